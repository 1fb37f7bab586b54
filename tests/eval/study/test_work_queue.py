"""Several processes on one study: each unit by one of them, a killed one's work redone."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvpolicies.errors import UserError
from kvpolicies.eval.study import launch, run
from kvpolicies.eval.study import work_queue as sharing
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, read_folder, read_rows, shards
from tests.support.rows import untimed

ROOT = Path(__file__).resolve().parents[3]
STUDY = Study(policies=("random",), budgets=("30",), problems=4, length=50, batch_size=1)
UNIT = 2 * run.UNIT_BATCHES  # rows of a unit
ROWS = 2 * UNIT
ARGUMENTS = [
    "compare", "--policies", "random", "--budgets", "30",
    "--problems", "4", "--length", "50", "--batch-size", "1",
]  # fmt: skip

LOST = """
import sys
from kvpolicies import cli
from kvpolicies.eval.study.results import Results
add = Results.add
def add_one_and_hang(results, row):
    add(results, row)
    print("hangs", flush=True)
    sys.stdin.read()
Results.add = add_one_and_hang
cli.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The study's finished folder, by one process."""
    return run.run_study(replace(STUDY, out=str(tmp_path_factory.mktemp("alone") / "out")))


def made(folder):
    return list(map(untimed, read_folder(folder)))


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **more}


@pytest.fixture
def lost(tmp_path):
    """Rank 1 of two: it writes one row to tmp_path/out and hangs, holding its unit."""
    with subprocess.Popen(
        [sys.executable, "-c", LOST, *ARGUMENTS, "--out", str(tmp_path / "out")],
        cwd=ROOT, env=environment(RANK="1", WORLD_SIZE="2"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def test_a_killed_rank_is_taken_over_by_the_other(alone, tmp_path, lost, monkeypatch):
    """The rank that is left does the unit that is free, waits, and has the other's after a kill."""
    out, waits = tmp_path / "out", []
    assert lost.stdout.readline() == "hangs\n"
    kept = read_rows(out / NAME)
    assert len(kept) == 1

    def wait(seconds):
        waits.append([len(read_rows(path)) for path in shards(out)])
        if len(waits) == 2:
            lost.kill()
            assert lost.wait() == -signal.SIGKILL

    monkeypatch.setattr(sharing, "time", SimpleNamespace(sleep=wait))
    run.run_study(replace(STUDY, out=str(out)))
    assert waits == [[1, ROWS - UNIT]] * 2
    assert shards(out) == [out / NAME]
    assert made(out) == made(alone) and len(made(out)) == ROWS
    assert kept[0] in read_folder(out)  # timing and all


@pytest.mark.slow
def test_torchrun(alone, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "kvpolicies", *ARGUMENTS, "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: ") == 1  # the leading rank speaks
    assert made(out) == made(alone) and shards(out) == [out / NAME]
    assert (out / "report.html").exists() and (out / "pairs.csv").exists()


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, launch.ProcessRank()),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, launch.ProcessRank(1, 4, 0)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, launch.ProcessRank(3, 4, 0)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be a whole number"),
    ],
)
def test_the_place_of_a_process(monkeypatch, given, place):
    for name in [n for n in os.environ if n.startswith("SLURM") or "RANK" in n or "WORLD" in n]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if isinstance(place, str):
        with pytest.raises(UserError, match=place):
            launch.here()
    else:
        assert launch.here() == place
