"""`generate` and `replay` on real files; refusals are one line, status 2, nothing written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicies import registry
from kvpolicies.cli import main
from kvpolicies.config import Deployment, dump_yaml
from kvpolicies.eval.tasks.ledger import make_problem
from kvpolicies.models import embedded
from kvpolicies.trace import EvictionTrace


def fails(argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(argv) == 2
    captured = capsys.readouterr()
    lines = [x for x in captured.err.splitlines() if x.startswith("kvpolicies: ")]
    assert len(lines) == 1 and hint in lines[0] and "Traceback" not in captured.err
    # In a line of its own, also where bars were shown.
    assert captured.err[max(0, captured.err.index(lines[0]) - 1)] in "\r\nk"
    assert not captured.out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--kernels", "cuda", "kernels must be one of auto, torch, triton"),
        ("--kernels", "triton", "use auto or torch"),
        ("--step", "fast", "step must be one of auto, eager, fixed"),
        ("--step", "graph", "CUDA graph"),
        ("--dtype", "int8", "dtype must be one of float32"),
    ],
)
def test_how_steps_and_kernels_run_is_refused_in_one_line(option, value, message, capsys):
    command = ["generate", "--model", "embedded", "--budget", "69", "--raw", "--prompt", "ann"]
    if value == "triton":
        pytest.importorskip("triton")
    assert main([*command, option, value]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_steps_of_fixed_shapes_write_the_same_text(capsys):
    prompt = "ledger bob 7 ann 3 plan #1 ann #2 bob #3 answer go"
    command = ["generate", "--model", "embedded", "--budget", "40", "--raw", "--prompt", prompt]
    texts = []
    for more in ([], ["--step", "fixed", "--kernels", "torch"]):
        assert main([*command, "--max-new-tokens", "60", *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()


def test_generate_from_a_deployment_file_then_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = make_problem(0, length=150)
    config = Deployment(policy="beacon(n_beacon=8, n_recent=8)", budget="80", max_new_tokens=200)
    (tmp_path / "deploy.yaml").write_text(dump_yaml(config))
    (tmp_path / "prompts").write_text(problem.prompt + "\n")
    command = ["generate", str(tmp_path / "deploy.yaml"), "--json", "--raw"]
    files = ["--prompt-file", str(tmp_path / "prompts"), "--trace", str(tmp_path / "traces")]
    assert main(command + files) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["max_slots"] == 80 and record["tokens"] > 60 and record["state_bytes"] > 0
    assert len(record["ids"]) == record["tokens"]
    assert len(record["prompt_ids"]) == record["prompt_tokens"] == len(problem.prompt.split())
    path = tmp_path / "traces" / "0.safetensors"
    trace = EvictionTrace.load(path)
    assert trace.tokens[0].tolist() == [*record["prompt_ids"], *record["ids"][:-1]]
    assert main(["replay", str(path)]) == 0
    told = f"all {record['tokens']} new tokens are greedy under the replayed mask"
    assert capsys.readouterr().out.splitlines()[1] == told
    wrong = trace.tokens.clone()
    wrong[0, -3] = 0  # which changes what follows, too
    replace(trace, tokens=wrong).save(path)
    assert main(["replay", str(path)]) == 0
    agree, rest = capsys.readouterr().out.splitlines()[1].split(" of ")
    assert 0 < int(agree) < record["tokens"] and rest == told.removeprefix("all ")
    replace(trace, prompts=None, last=None).save(path)  # as an older version wrote it
    assert main(["replay", str(path)]) == 0
    assert f" of {trace.tokens.shape[1] - 1} tokens are (a prompt's" in capsys.readouterr().out


def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.POLICIES, "broken", "tests.support.broken:Broken")
    long = make_problem(0, length=150)
    line = f"{long.prompt} {long.trace}"
    command = ["generate", "--raw", "--budget", "60", "--prompt"]
    fails([*command, line, "--policy", "broken"], "NaN in a score", capsys)
    fails([*command, ""], "no tokens", capsys)
    out = tmp_path / "study"
    compare = ["compare", "--policies", "broken", "--problems", "2", "--budgets", "40"]
    fails([*compare, "--length", "150", "--out", str(out)], "NaN in a score", capsys)
    rows = [json.loads(x) for x in (out / "results.jsonl").read_text().splitlines()]
    assert {r["policy"] for r in rows} == {"full"}, "only finished samples are written"


def test_an_unsupported_model_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=16,
    )
    _, tokenizer = embedded.load()
    tokenizer.save_pretrained(tmp_path)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    command = ["generate", "--raw", "--model", str(tmp_path), "--prompt", make_problem(0).prompt]
    fails(command, "MistralForCausalLM", capsys)
