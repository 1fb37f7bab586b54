"""Runs: deterministic, resumable after a real SIGKILL, never mixed with another study."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpolicies.errors import UserError
from kvpolicies.eval import report
from kvpolicies.eval.study import provenance, run
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, read_rows
from kvpolicies.learned.policy import ASSETS
from tests.support.rows import untimed

ROOT = Path(__file__).resolve().parents[3]


def made(folder: Path) -> list[dict]:
    return list(map(untimed, read_rows(folder / NAME)))


def without_timings(folder: Path) -> bytes:
    """results.jsonl, byte for byte but for its timings."""
    return re.sub(rb'"(seconds|processor)": ?[0-9.e+-]+', b"", (folder / NAME).read_bytes())


def table(study: Study, folder: Path) -> list[list[str]]:
    """The summary's lines without the last columns, CPU ms a token and tokens/s."""
    report.write_report(folder, study.resolved())
    lines = (folder / "summary.csv").read_text().splitlines()
    return [line.split(",")[:-2] for line in lines]


def test_every_cell_has_every_problem(small_study):
    study, folder = small_study
    rows = read_rows(folder / NAME)
    assert len(rows) == 3 * 4
    for cell in run.cells(study):
        mine = [row for row in rows if (row["policy"], row["budget"]) == cell]
        assert len({row["problem"] for row in mine}) == 4
        assert all(row["max_slots"] <= row["slots"] for row in mine)
        if cell.policy != "full":
            assert {row["slots"] for row in mine} == {int(cell.budget)}


def test_the_same_study_gives_the_same_rows(small_study, tmp_path):
    study, folder = small_study
    again = run.run_study(replace(study, out=str(tmp_path)))
    assert without_timings(again) == without_timings(folder)
    assert b"seconds" in (folder / NAME).read_bytes()


def test_a_finished_study_runs_nothing(small_study, monkeypatch):
    study, folder = small_study
    monkeypatch.setattr(run, "generate", None)
    before = (folder / NAME).read_bytes()
    run.run_study(study)
    assert (folder / NAME).read_bytes() == before


def test_only_missing_rows_are_appended(small_study, tmp_path):
    study, folder = small_study
    lines = (folder / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    (tmp_path / NAME).write_bytes(b"".join(lines[1:5] + lines[8:]) + lines[0][:25])
    kept = (tmp_path / NAME).read_bytes()[:-25]
    run.run_study(replace(study, out=str(tmp_path)))
    assert (tmp_path / NAME).read_bytes().startswith(kept)
    by_key = {json.dumps(row, sort_keys=True) for row in made(tmp_path)}
    assert by_key == {json.dumps(row, sort_keys=True) for row in made(folder)}
    assert len(made(tmp_path)) == len(lines)
    assert table(study, tmp_path) == table(study, folder)


@pytest.mark.slow
def test_a_killed_run_continues_and_ends_with_the_same_table(small_study, tmp_path):
    study, folder = small_study
    command = [
        sys.executable, "-m", "kvpolicies", "compare", "--policies", "streaming,random",
        "--budgets", "40", "--problems", "4", "--length", "80", "--batch-size", "2",
        "--out", str(tmp_path),
    ]  # fmt: skip
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    results = tmp_path / NAME
    while not (results.exists() and results.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "no rows within four minutes"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    there = len(read_rows(results))
    assert 3 <= there < len(made(folder))
    assert not (tmp_path / "report.html").exists()
    run.run_study(replace(study, out=str(tmp_path)))
    assert made(tmp_path) == made(folder)
    assert table(study, tmp_path) == table(study, folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, r"seed \(0 -> 1\)"),
        ({"length": 90}, "the problems"),
    ],
)
def test_another_study_in_the_folder_is_refused_and_nothing_touched(small_study, changes, says):
    study, folder = small_study
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=says):
        run.run_study(replace(study, **changes))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_results_of_other_weights_are_not_continued(small_study, tmp_path):
    study, folder = small_study
    record = json.loads((folder / "run.json").read_text())
    record["model"]["weights"] = "0123456789abcdef"
    (tmp_path / "run.json").write_text(json.dumps(record))
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UserError, match="other weights"):
        run.run_study(replace(study, out=str(tmp_path)))
    assert (tmp_path / "run.json").read_bytes() == before
    assert not (tmp_path / NAME).exists()


def test_results_without_their_run_json_are_refused(tmp_path):
    (tmp_path / NAME).write_text("{}\n")
    with pytest.raises(UserError, match=r"without run\.json"):
        run.run_study(Study(out=str(tmp_path)))


@pytest.mark.parametrize(
    ("policy", "budget", "says"),
    [
        ("random", "1%", "ledger-0"),
        ("kvpop", "40", "ledger-0.*the budget's window of 10 is too small"),
        ("kvpop(scorer='BROKEN')", "69", "scorer.safetensors: cannot be read"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, policy, budget, says):
    out, broken = tmp_path / "out", tmp_path / "broken"
    shutil.copytree(ASSETS / "kvpop", broken)
    (broken / "scorer.safetensors").write_bytes(b"half")
    policies = (policy.replace("BROKEN", str(broken)),)
    with pytest.raises(UserError, match=says):
        run.run_study(Study(budgets=(budget,), policies=policies, length=80, out=str(out)))
    assert not out.exists()


def test_nan_in_a_score_stops_the_run_in_one_line(small_study, tmp_path, monkeypatch):
    from kvpolicies.baselines.random import Random

    study, _ = small_study
    monkeypatch.setattr(
        Random, "scores", lambda self, view: torch.full(view.positions.shape, float("nan"))
    )
    with pytest.raises(UserError, match="NaN"):
        run.run_study(replace(study, policies=("random",), problems=1, out=str(tmp_path)))


def test_samples_differ_and_do_not_depend_on_the_batch(tmp_path):
    study = Study(
        policies=("random",), budgets=("30",), problems=1, samples=3, length=60,
        temperature=2.0, out=str(tmp_path / "a"),
    )  # fmt: skip
    together = made(run.run_study(study))
    alone = made(run.run_study(replace(study, batch_size=1, out=str(tmp_path / "b"))))

    def texts(rows):
        return {(row["policy"], row["sample"]): row["text"] for row in rows}

    assert texts(together) == texts(alone)
    assert len(set(texts(together).values())) > 1


def test_a_study_has_sinks_and_a_window_of_its_own(tmp_path):
    """A budget of 4 slots cannot have the usual 4 sinks; a window of 3 leaves one to choose."""
    study = Study(
        policies=("streaming", "random"), budgets=("4", "10%"), sinks=0, window=3,
        problems=1, length=60, out=str(tmp_path),
    )  # fmt: skip
    rows = read_rows(run.run_study(study) / NAME)
    kept = {r["policy"]: r["held"]["levels"][-1] for r in rows if r["budget"] == "4"}
    assert kept["streaming"].strip("0") == "9999"  # the newest, one after another
    assert all(levels.endswith("999") for levels in kept.values())
    assert {r["slots"] for r in rows if r["budget"] == "4"} == {4}


def test_run_json_says_what_ran(small_study):
    study, folder = small_study
    record = json.loads((folder / "run.json").read_text())
    assert record["study"] == study.identity()
    assert record["model"]["num_key_value_heads"] == 2
    [here] = record["environments"]
    assert here == provenance.environment()
    assert here["threads"] == torch.get_num_threads() and here["packages"]["torch"]


@pytest.mark.parametrize("out", ["file/x", "x" * 5000])
def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path, out):
    from kvpolicies.files import make_folder

    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made") as error:
        make_folder(tmp_path / out)
    assert "\n" not in str(error.value)


def test_all_policies_draw_the_same_random_numbers(tmp_path):
    """Where nothing needs to go, every policy samples full's own text; no other sample's."""
    study = Study(
        policies=("random", "streaming"), budgets=("100%",), problems=1, samples=2, length=50,
        temperature=20.0, top_p=1.0, out=str(tmp_path),
    )  # fmt: skip
    rows = made(run.run_study(study))
    texts = {(row["policy"], row["sample"]): row["text"] for row in rows}
    for sample in (0, 1):
        mine = {texts[policy, sample] for policy in ("full", "random", "streaming")}
        assert len(mine) == 1
    assert texts["full", 0] != texts["full", 1]
