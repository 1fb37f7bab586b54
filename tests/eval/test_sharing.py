"""Several processes on one study: each unit by one of them, a killed one's work redone."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpolicies.errors import UserError
from kvpolicies.eval import launch, report, run
from kvpolicies.eval.results import NAME, read_folder, shards
from kvpolicies.eval.study import Study

ROOT = Path(__file__).resolve().parents[2]
STUDY = Study(policies=("random",), budgets=("30",), problems=4, length=50, batch_size=1)
ROWS = 2 * 4
UNIT = 2 * run.UNIT_BATCHES  # rows of a unit
COMMAND = [
    "-m", "kvpolicies", "compare", "--policies", "random", "--budgets", "30",
    "--problems", "4", "--length", "50", "--batch-size", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The study's finished folder, by one process."""
    study = replace(STUDY, out=str(tmp_path_factory.mktemp("alone") / "out"))
    folder = run.run_study(study)
    report.write_report(folder, study.resolved())
    return folder


def untimed(folder):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_folder(folder)]


def table(folder):
    """summary.csv without its timings, and pairs.csv."""
    lines = (folder / "summary.csv").read_text().splitlines()
    return [line.rpartition(",")[0] for line in lines], (folder / "pairs.csv").read_text()


def start(folder, rank, log):
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "RANK": str(rank),
        "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *COMMAND, "--out", str(folder)],
        cwd=ROOT, env=environment, stdout=log, stderr=log,
    )  # fmt: skip


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(true, process):
    deadline = time.monotonic() + 240
    while not true():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline, "nothing within four minutes"
        time.sleep(0.005)


@pytest.fixture
def ranks(tmp_path):
    """Starts a rank of the study in tmp_path/out; kills whatever still runs at the end."""
    started = []
    with (tmp_path / "log").open("wb") as log:

        def start_rank(rank):
            started.append(start(tmp_path / "out", rank, log))
            return started[-1]

        yield start_rank
        for process in started:
            process.kill()
            process.wait()


def test_a_killed_rank_is_taken_over_by_the_other(alone, tmp_path, ranks):
    """Rank 1 stops inside its first unit, holding it; the others are done; it is killed."""
    out = tmp_path / "out"
    lost = ranks(1)
    until(lambda: lines(out / NAME) >= 1, lost)
    lost.send_signal(signal.SIGSTOP)
    written = lines(out / NAME)
    assert 1 <= written < UNIT
    other = ranks(0)
    until(lambda: lines(out / "results.0001.jsonl") == ROWS - UNIT, other)
    assert other.poll() is None, "it must wait for what rank 1 holds"
    lost.kill()
    assert lost.wait() == -signal.SIGKILL
    assert other.wait(240) == 0
    assert shards(out) == [out / NAME]
    assert untimed(out) == untimed(alone)
    assert table(out) == table(alone)
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_torchrun(alone, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        *COMMAND, "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: ") == 1  # the leading rank speaks
    assert untimed(out) == untimed(alone) and shards(out) == [out / NAME]


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, launch.Place()),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, launch.Place(1, 4, 0)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, launch.Place(3, 4, 0)),
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
