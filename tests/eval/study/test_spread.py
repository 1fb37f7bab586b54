"""One model over two processes (transformers' tensor parallelism, gloo): the tokens of one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from kvpolicies.errors import UserError
from kvpolicies.eval.study import run
from kvpolicies.eval.study.config import Study, load_study
from kvpolicies.eval.study.results import read_folder
from tests.support.spread import generated

ROOT = Path(__file__).resolve().parents[3]
POLICIES = ("full", "beacon", "snapkv", "random", "tova", "rpc")


@pytest.mark.slow
def test_tokens_are_those_of_one_process(tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "tests/support/spread.py", str(tmp_path), *POLICIES,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout.splitlines()[-1])
    assert one == two
    alone = generated(model, POLICIES)
    for policy in ("full", "beacon", "snapkv", "random"):
        assert one[policy] == alone[policy]
    assert one["full"] != one["random"]  # something was evicted
    for policy in ("tova", "rpc"):
        assert f"policy {policy} scores a layer's KV heads together" in one[policy]
        assert isinstance(alone[policy], list)


@pytest.mark.slow
def test_studies_are_those_of_one_process(tmp_path):
    """Two of them, in one process group."""
    for name, length in (("near", 60), ("far", 80)):
        (tmp_path / f"{name}.yaml").write_text(
            f"policies: [random]\nbudgets: [30]\nproblems: 2\nlength: {length}\n"
        )
    studies = [str(tmp_path / "near.yaml"), str(tmp_path / "far.yaml")]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "kvpolicies", "compare", *studies, "--tensor-parallel", "2",
        "--out", str(tmp_path / "two"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for name in ("near", "far"):
        study = replace(load_study(str(tmp_path / f"{name}.yaml")), out=str(tmp_path / name))
        one, two = read_folder(run.run_study(study)), read_folder(tmp_path / "two" / name)
        assert [row["text"] for row in one] == [row["text"] for row in two] and len(one) == 4


def test_another_number_of_processes_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    study = Study(policies=("random",), tensor_parallel=2, out=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"nproc-per-node 2\), not 4"):
        run.run_study(study)
    assert not (tmp_path / "out").exists()
