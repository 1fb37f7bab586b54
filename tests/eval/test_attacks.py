"""Hundreds of bad inputs to every command: no traceback, no hang, one short line.

A part of each group; KVPOLICIES_ATTACKS=all tries every input, some thousands.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout

import pytest

from kvpolicies.cli import main
from kvpolicies.eval.tasks.ledger import make_problem
from kvpolicies.models import embedded
from tests.support import attacks
from tests.support.attacks import Ground

pytestmark = pytest.mark.slow

SECONDS = 20
"""A refusal that takes longer is a hang."""
LONGEST = 1100
FIRST, STRIDE = 15, 17
"""Of a group the first so many inputs are tried, and of the rest one in so many."""
RECIPE = {"kind": "kvpop_mlp", "hidden": 16, "sequence": 320, "budget": 69, "delay": 16,
          "min_future": 16, "held_out": 2, "batch": 1, "steps": 1, "checkpoint_every": 1,
          "validate_every": 1, "log_every": 1, "warmup": 0}  # fmt: skip
PROBLEM = {"id": "a", "problem": "1 + 1", "answer": "2", "solution": "1 + 1 = 2", "choices": ["3"],
           "tests": [{"input": "1", "output": "2"}]}  # fmt: skip


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """One good thing of each kind, all of the embedded model."""
    root = tmp_path_factory.mktemp("ground")
    (root / "spoilt").mkdir()
    (root / "recipe.yaml").write_text(json.dumps({**RECIPE, "out": str(root / "run")}))
    (root / "data.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    model, tokenizer = embedded.load()
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    prompt = make_problem(0, length=60).prompt
    made = ["generate", "--raw", "--budget", "40", "--max-new-tokens", "9", "--prompt", prompt]
    for argv in (
        ["compare", *attacks.STUDY, "--out", str(root / "study")],
        ["revisit", *attacks.REVISIT, "--out", str(root / "analysis")],
        ["bench", *attacks.BENCH, "--out", str(root / "bench")],
        ["train", str(root / "recipe.yaml")],
        [*made, "--trace", str(root / "traces")],
    ):
        assert main(argv) == 0, argv
    return Ground(
        root, root / "study", root / "analysis", root / "model", root / "traces/0.safetensors",
        root / "run" / "scorer", root / "bench", root / "run", root / "data.jsonl",
    )  # fmt: skip


def faults(what: str, argv: list[str]) -> list[str]:
    """What is wrong with how a command refuses (or takes) these arguments."""
    out, err = io.StringIO(), io.StringIO()

    def hangs(*_: object) -> None:
        raise TimeoutError(f"{SECONDS} s are over")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    began, found = time.perf_counter(), []
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(argv)
    except BaseException:
        status = -1
        found.append(traceback.format_exc())
    finally:
        signal.alarm(0)
    told = [line for line in err.getvalue().split("\n") if line.startswith("kvpolicies: ")]
    told = [line for line in told if not line.startswith("kvpolicies: caution: ")]
    if status == 2 and len(told) != 1:
        found.append(f"{len(told)} messages: {err.getvalue()[:500]}")
    if status not in (0, 2, 3, 4, -1):
        found.append(f"status {status}")
    for line in told:
        if len(line) > LONGEST or re.search(r"\S{260,}", line):
            found.append(f"long: {line[:3000]}")
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", line):
            found.append(f"control characters: {line!r}")
    if time.perf_counter() - began > SECONDS:
        found.append("too slow")
    return [f"{what}: {' '.join(argv)[:300]}\n{one}" for one in found]


@pytest.mark.parametrize("group", attacks.GROUPS, ids=lambda group: group.__name__)
def test_bad_inputs_are_refused_in_one_line(group, ground, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvpolicies.serve.running.run", lambda *_: 0)
    found, count = [], 0
    every = 1 if os.environ.get("KVPOLICIES_ATTACKS") == "all" else STRIDE
    for what, argv in group(ground):
        count += 1
        if count <= FIRST or count % every == 0:
            found += faults(what, argv)
    print(f"{group.__name__}: {count} inputs, {len(found)} faults")
    assert count >= 25 and not found, "\n\n".join(found[:20])
