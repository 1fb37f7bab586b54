"""Whole runs: what is learned, and that kills, resumptions and devices change nothing."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import kvpolicies
from kvpolicies.cli import main
from kvpolicies.eval.tasks import ledger
from kvpolicies.models import embedded
from kvpolicies.train.recipe import load_recipe

pytest.importorskip("lightning")

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "kind": "kvpop_mlp",
    "hidden": 16,
    "sequence": 320,
    "budget": 69,
    "delay": 16,
    "min_future": 16,
    "batch": 2,
    "held_out": 2,
    "warmup": 2,
    "lr": 0.01,
    # Pairs say nothing of a score's bias: without this Adam would walk it by rounding alone.
    "regression": 0.02,
    "device": "cpu",
    "log_every": 1,
}


def recipe(folder: Path, **options: object) -> Path:
    """A recipe's file in a folder; its run goes to the folder `run` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "out": str(folder / "run"), **options}))
    return path


def begun(path: Path) -> "subprocess.Popen[bytes]":
    """`kvpolicies train` as a process of its own, as a user starts it."""
    command = [sys.executable, "-m", "kvpolicies", "train", str(path)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def weights(folder: Path) -> dict[str, Tensor]:
    """The trained scorer's."""
    return load_file(folder / "run" / "scorer" / "scorer.safetensors")


def curve(folder: Path) -> dict[int, float]:
    """Loss by step; of a step that was run twice, the last."""
    found = {}
    for path in sorted((folder / "run" / "logs" / "csv").glob("version_*/metrics.csv")):
        for line in csv.DictReader(path.open()):
            if line.get("train/loss"):
                found[int(line["step"])] = float(line["train/loss"])
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 14 steps from its beginning to its end."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert main(["train", str(recipe(folder, steps=14, checkpoint_every=4))]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_run_ends_with_the_weights_of_an_unbroken_one(
    unbroken: Path, tmp_path: Path
) -> None:
    path = recipe(tmp_path, steps=14, checkpoint_every=4)
    checkpoint = tmp_path / "run" / "checkpoints" / "step=4.ckpt"
    process = begun(path)
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    output = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, output.decode()[-2000:]
    assert not (tmp_path / "run" / "scorer").exists()
    assert main(["train", str(path), "--resume"]) == 0
    expected, found = weights(unbroken), weights(tmp_path)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    last = curve(unbroken)
    assert {s: x for s, x in curve(tmp_path).items() if s >= 4} == {
        s: x for s, x in last.items() if s >= 4
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_train_as_one_does_with_the_same_rows(unbroken: Path, tmp_path: Path) -> None:
    options = {"devices": 2, "strategy": "ddp"}
    process = begun(recipe(tmp_path, steps=14, checkpoint_every=4, **options))
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output[-2000:]
    one, two = curve(unbroken), curve(tmp_path)
    assert one.keys() == two.keys()
    for step, loss in one.items():
        assert two[step] == pytest.approx(loss, rel=1e-4), step
    expected, found = weights(unbroken), weights(tmp_path)
    for name, tensor in expected.items():
        assert (tensor - found[name]).abs().max() < 1e-4, name
    figures = [json.loads((f / "run" / "run.json").read_text()) for f in (unbroken, tmp_path)]
    for name, value in figures[0]["figures"].items():
        assert figures[1]["figures"][name] == pytest.approx(value, abs=0.02), name


def test_parts_of_a_step_add_up(unbroken: Path, tmp_path: Path) -> None:
    assert main(["train", str(recipe(tmp_path, steps=14, accumulate=2))]) == 0
    for name, tensor in weights(unbroken).items():
        assert (tensor - weights(tmp_path)[name]).abs().max() < 1e-4, name


def test_another_recipe_is_refused_in_the_same_folder(unbroken: Path, capsys) -> None:
    saved = (unbroken / "recipe.yaml").read_text()
    path = unbroken / "other.yaml"
    path.write_text(saved.replace("lr: 0.01", "lr: 0.02"))
    assert main(["train", str(path)]) == 2
    assert "holds another run; different: lr (0.01 -> 0.02)" in capsys.readouterr().err
    # The run itself is over: the command says so again, and changes nothing.
    before = weights(unbroken)
    assert main(["train", str(unbroken / "recipe.yaml")]) == 0
    assert "held out: recall" in capsys.readouterr().out
    assert all(torch.equal(x, before[name]) for name, x in weights(unbroken).items())


def test_a_run_writes_what_it_was(unbroken: Path) -> None:
    run = unbroken / "run"
    known = json.loads((run / "run.json").read_text())
    assert known["finished"] and known["environments"][0]["packages"]["lightning"]
    assert {"recall", "chance", "accuracy", "spearman"} <= set(known["figures"])
    lines = list(csv.DictReader((run / "figures.csv").open()))
    assert {(x["layer"], x["head"]) for x in lines} == {
        (str(n), str(h)) for n in range(4) for h in (0, 1)
    }
    assert {x["step"] for x in lines} == {"14"}
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "step=12.ckpt",
        "step=8.ckpt",
    ]
    assert list((run / "logs" / "tensorboard").glob("version_*/events*"))


def test_a_scorer_that_trained_knows_more_than_chance_and_serves_its_policy(tmp_path: Path) -> None:
    options = {"kind": "kvpop", "hidden": 0, "memory": 8, "steps": 30, "validate_every": 30}
    assert main(["train", str(recipe(tmp_path, **options, sequence=512, held_out=6))]) == 0
    figures = json.loads((tmp_path / "run" / "run.json").read_text())["figures"]
    assert figures["accuracy"] > 0.7 and figures["recall"] > figures["chance"] + 0.2
    assert figures["spearman"] > 0.3
    model, tokenizer = embedded.load()
    problem = ledger.make_problem(0, length=200)
    prompt = tokenizer.encode(problem.prompt)
    policy = f"kvpop(scorer={str(tmp_path / 'run' / 'scorer')!r})"
    done = kvpolicies.generate(model, [prompt], policy, "69", max_new_tokens=60)
    words = str(tokenizer.decode(done[0].tokens)).split()
    assert words[:40] == problem.trace.split()[:40]


def test_the_papers_recipe_runs_at_a_models_size(tmp_path: Path) -> None:
    paper = load_recipe("kvpop-paper")
    assert (paper.sequence, paper.budget, paper.lag, paper.steps) == (16384, (4096,), 256, 2000)
    small = {
        "model": "embedded", "data": "ledger", "stream": "false", "sequence": 640, "batch": 1,
        "accumulate": 1, "devices": 1, "strategy": "auto", "steps": 2, "budget": 101, "window": 25,
        "min-future": 16, "held-out": 3, "dtype": "float32", "device": "cpu", "out": tmp_path,
    }  # fmt: skip
    options = [text for key, value in small.items() for text in (f"--{key}", str(value))]
    assert main(["train", "kvpop-paper", *options]) == 0
    known = json.loads((tmp_path / "run.json").read_text())
    assert known["recipe"]["longer"] == "leave_out"
    assert known["recipe"]["delay"] == 25  # a token is scored as it leaves the window
    assert 0 < known["figures"]["recall"] <= 1
    assert (tmp_path / "model").is_dir()
