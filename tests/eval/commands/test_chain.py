"""From studies to a server: every command on what the one before it wrote, a kill in between."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpolicies
from kvpolicies.cli import main
from kvpolicies.config import Deployment, load_yaml
from kvpolicies.eval.study.results import read_folder, shards
from kvpolicies.eval.tasks import ledger
from kvpolicies.models import embedded
from tests.support.servers import ROOT, server, until

CELLS, PROBLEMS = 9, 6  # full, and four policies at two budgets


def studies(folder: Path) -> list[str]:
    """Two files of studies that differ in their problems."""
    paths = []
    for name, length in (("near", 90), ("far", 120)):
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(
            "policies: [beacon, rkv, keydiff, random]\nbudgets: [40, 60]\n"
            f"problems: {PROBLEMS}\nlength: {length}\nbatch_size: 1\n"
        )
    return list(map(str, paths))


def started(folder: Path, rank: int) -> "subprocess.Popen[bytes]":
    """One of two processes on both studies, as torchrun or SLURM start them."""
    command = [sys.executable, "-m", "kvpolicies", "compare", *studies(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"}
    return subprocess.Popen(
        [*command, "--out", str(folder / "results")], env=env, cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@contextlib.contextmanager
def both(folder: Path) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Both processes; none of them outlives the block."""
    with started(folder, 0) as first, started(folder, 1) as second:
        try:
            yield [first, second]
        finally:
            first.kill()
            second.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_studies_in_two_processes_killed_and_resumed_choose_what_a_server_runs(tmp_path, capsys):
    near, far = tmp_path / "results" / "near", tmp_path / "results" / "far"
    with both(tmp_path):
        until(lambda: near.exists() and any(p.stat().st_size for p in shards(near)), "a row")
    before = read_folder(near)
    assert 0 < len(before) < CELLS * PROBLEMS and not far.exists()
    with both(tmp_path) as processes:
        assert [process.wait(240) for process in processes] == [0, 0]
    for folder in (near, far):
        assert len(read_folder(folder)) == CELLS * PROBLEMS and len(shards(folder)) == 1
        assert (folder / "report.html").exists()
    after = read_folder(near)
    assert all(row in after for row in before)  # timings and all

    deploy = tmp_path / "deploy.yaml"
    load = ["--batch", "2", "--max-tokens", "60", "--memory", "1GB", "--largest-loss", "0.99"]
    assert main(["select", str(near), str(far), *load, "--out", str(deploy)]) == 0
    assert "wins" in capsys.readouterr().out
    chosen = load_yaml(Deployment, deploy)
    prompt = ledger.make_problem(7, length=90).prompt
    with server(str(deploy)) as running:
        body = {"model": chosen.model, "prompt": prompt, "max_tokens": 30, "temperature": 0}
        status, _, text = running.ask("/v1/completions", body)
        assert status == 200, text
    model, tokenizer = embedded.load()
    ids = tokenizer.encode(prompt)
    (alone,) = kvpolicies.generate(model, [ids], chosen.policy, chosen.budget, max_new_tokens=30)
    answer, offline = json.loads(text)["choices"][0]["text"], str(tokenizer.decode(alone.tokens))
    assert answer.split() == offline.split()
