"""Policies that look ahead, in a generating study: replayed, marked, resumed."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicies.decoding import Generation
from kvpolicies.errors import UserError
from kvpolicies.eval import report
from kvpolicies.eval.report import findings as words
from kvpolicies.eval.study import lookahead, run
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, Key, read_rows
from kvpolicies.eval.study.summary import summarise
from tests.support.rows import untimed

STUDY = Study(
    policies=("streaming", "oracle"), budgets=("40", "200"), problems=3, length=80, batch_size=2
)


@pytest.fixture(scope="module")
def looked_ahead(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    """(resolved study, its finished folder, with a report). Read it, do not write."""
    study = replace(STUDY, out=str(tmp_path_factory.mktemp("ahead") / "out"))
    folder = run.run_study(study)
    report.write_report(folder, study.resolved())
    return study.resolved(), folder


def cell(folder: Path, policy: str, budget: str) -> list[dict]:
    rows = list(map(untimed, read_rows(folder / NAME)))
    return [row for row in rows if (row["policy"], row["budget"]) == (policy, budget)]


def test_with_room_for_all_it_says_what_full_says(looked_ahead):
    folder = looked_ahead[1]
    for theirs, full in zip(
        cell(folder, "oracle", "200"), cell(folder, "full", "full"), strict=True
    ):
        assert (theirs["tokens"], theirs["text"]) == (full["tokens"], full["text"])
        assert (theirs["finish"], theirs["correct"]) == (full["finish"], full["correct"])


def test_rows_say_that_they_replay_and_hold_their_own_choices(looked_ahead):
    folder = looked_ahead[1]
    for row, full in zip(cell(folder, "oracle", "40"), cell(folder, "full", "full"), strict=True):
        assert row["mode"] == "replays full's tokens"
        assert row["max_slots"] == row["slots"] == 40
        assert 0 < row["length"] == len(row["tokens"]) <= len(full["tokens"])
    assert not any("mode" in row for row in cell(folder, "streaming", "40"))


def test_it_is_marked_wherever_numbers_are_shown(looked_ahead):
    folder = looked_ahead[1]
    page = (folder / report.NAME).read_text()
    assert ">oracle †</th>" in page and ">oracle</t" not in page
    assert "no policy to deploy" in page
    with (folder / "summary.csv").open() as file:
        marked = {line["policy"]: line["lookahead"] for line in csv.DictReader(file)}
    assert marked == {"full": "0", "streaming": "0", "oracle": "1"}


def test_it_is_no_contestant(looked_ahead):
    study, folder = looked_ahead
    rows = read_rows(folder / NAME)
    said = words.sentences(study, summarise(study, rows), rows)
    for line in said:
        assert "oracle" not in line or ("oracle † at" in line and "no contestant" in line)
    assert sum("oracle †" in line for line in said) == 2


def test_a_killed_run_ends_with_the_same_rows(looked_ahead, tmp_path):
    """Rows of full, from which the others are replayed, may be missing too."""
    study, folder = looked_ahead
    lines = (folder / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    (tmp_path / NAME).write_bytes(b"".join(lines[1:9]))
    run.run_study(replace(study, out=str(tmp_path)))

    def keyed(path: Path) -> set[str]:
        rows = list(map(untimed, read_rows(path / NAME)))
        return {json.dumps(row, sort_keys=True) for row in rows}

    assert keyed(tmp_path) == keyed(folder)


def test_sampled_choices_are_drawn_as_full_drew_them(tmp_path):
    study = Study(
        policies=("oracle(every=8)",), budgets=("120",), problems=1, samples=2, length=60,
        temperature=2.0, out=str(tmp_path),
    )  # fmt: skip
    folder = run.run_study(study)
    full = [row["tokens"] for row in cell(folder, "full", "full")]
    assert [row["tokens"] for row in cell(folder, "oracle(every=8)", "120")] == full
    assert full[0] != full[1]


def made(choices: list[int]) -> Generation:
    return Generation(0, [7] * len(choices), "length", 3, 0.0, 4, 4, 4, 0, 0, choices)


@pytest.mark.parametrize(
    ("choices", "tokens", "finish"),
    [
        ([5, 6, 1], [5, 6, 1], "stop"),
        ([5, 1, 6, 1], [5, 1], "stop"),
        ([5, 6], [5, 6], "length"),
    ],
)
def test_choices_end_at_the_first_stop_token(choices, tokens, finish):
    ended = lookahead.as_chosen(made(choices), stops=[1, 2])
    assert (ended.tokens, ended.finish) == (tokens, finish)


def test_missing_rows_of_full_are_named():
    with pytest.raises(UserError, match="no tokens of full for problem 'p'"):
        lookahead.tokens_of([], [Key("full", "full", "p", 0)])


def test_modes():
    assert lookahead.mode("beacon", forced=False) == lookahead.mode("random", forced=True) == ""
    assert lookahead.mode("oracle(every=4)", forced=True) == "looks ahead"
    assert "chooses" in lookahead.note(forced=False)
    assert "chooses" not in lookahead.note(forced=True)
