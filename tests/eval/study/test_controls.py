"""Controls: full's samples cut are what full writes under that limit; graded, paired, told."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpolicies.budget import BudgetSpec
from kvpolicies.eval import report
from kvpolicies.eval.report import analysis
from kvpolicies.eval.report import findings as words
from kvpolicies.eval.study import controls, run
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.controls import LENGTH, MEMORY, Cuts
from kvpolicies.eval.study.prompts import StudyRequest
from kvpolicies.eval.study.results import FULL, NAME, read_rows
from kvpolicies.eval.study.summary import summarise
from kvpolicies.eval.tasks.measures import ACCURACY
from kvpolicies.eval.tasks.task import TASKS, Problem

GRADES = ("correct", "lookups_right", "lookups")


def by_sample(folder, policy):
    rows = [row for row in read_rows(folder / NAME) if row["policy"] == policy]
    return {(row["problem"], row["sample"]): row for row in rows}


def test_a_cut_sample_is_what_full_writes_under_that_limit(tmp_path):
    study = Study(
        policies=("streaming",), budgets=("56",), problems=1, samples=3, length=80,
        temperature=1.5, out=str(tmp_path / "whole"),
    )  # fmt: skip
    folder = run.run_study(study)
    full, mine = by_sample(folder, FULL), by_sample(folder, "streaming")
    limit = 56 - next(iter(full.values()))["prompt_tokens"] + 1  # the last is never stored
    assert 4 < limit < min(row["length"] for row in full.values())
    short = run.run_study(
        replace(study, budgets=("40",), max_new_tokens=limit, out=str(tmp_path / "short"))
    )
    for key, row in by_sample(short, FULL).items():
        assert row["tokens"] == full[key]["tokens"][:limit] and row["max_slots"] == 56
        kept = mine[key]["controls"][MEMORY]
        grades = {name: row[name] for name in GRADES}
        answered = study.entry.answers(row["text"])
        assert kept == {"length": limit, "cut": True, "answered": answered, **grades}


def test_the_same_length_is_that_of_the_sample_beside_it(small_study):
    study, folder = small_study
    full = by_sample(folder, FULL)
    problems = {problem.id: problem for problem in study.load()}
    from kvpolicies.models import loading

    _, tokenizer = loading.load("embedded")
    for policy in study.policies:
        for key, row in by_sample(folder, policy).items():
            whole = full[key]
            length = min(row["length"], whole["length"])
            text = tokenizer.decode(whole["tokens"][:length], skip_special_tokens=True)
            grades = study.entry.grade(problems[key[0]], text)
            cut = {"cut": True, "answered": study.entry.answers(text)}
            cut = cut if length < whole["length"] else {"cut": False}
            assert row["controls"][LENGTH] == {"length": length, **cut, **grades}
    assert all("controls" not in row for row in full.values())


def cuts(grade, tokens, **row):
    made = {"policy": FULL, "budget": FULL, "problem": "a", "sample": 0, "tokens": tokens,
            "length": len(tokens), "correct": 1, **row}  # fmt: skip
    task: Any = SimpleNamespace(measures=(ACCURACY,), grade=grade, answers=lambda text: "2" in text)
    kept: Any = SimpleNamespace(rows=[made])
    return Cuts(task, kept, lambda tokens: " ".join(map(str, tokens)))


def sample(new, slots) -> Any:
    return SimpleNamespace(tokens=[0] * new, prompt_tokens=6, budget_total=slots)


def request():
    return StudyRequest(0, Problem("a", "", ""), 0, [1] * 6, 94)


def test_each_cut_is_graded_once_and_an_uncut_sample_never():
    graded = []

    def grade(problem, text):
        graded.append(text)
        return {"correct": 0}

    found = cuts(grade, list(range(10)))
    first = found.of(request(), sample(3, 10), BudgetSpec("10"))
    assert first == {
        LENGTH: {"length": 3, "cut": True, "answered": True, "correct": 0},
        MEMORY: {"length": 5, "cut": True, "answered": True, "correct": 0},
    }
    found.of(request(), sample(5, 10), BudgetSpec("10"))
    assert graded == ["0 1 2", "0 1 2 3 4"]
    assert found.of(request(), sample(50, 100), BudgetSpec("100")) == {
        name: {"length": 10, "cut": False, "correct": 1} for name in (LENGTH, MEMORY)
    }
    assert len(graded) == 2


@pytest.mark.parametrize(
    ("budget", "held", "kept"),
    [("12", 12, 7), ("12%", 12, 7), ("12", 20, 15), ("12", 9, 7), ("6", 6, 1)],
    ids=["slots", "share", "own rule", "charged", "prompt fills it"],
)
def test_the_memory_is_what_the_cell_holds(budget, held, kept):
    found = cuts(lambda problem, text: {"correct": 0}, list(range(40)))
    assert found.of(request(), sample(40, held), BudgetSpec(budget))[MEMORY]["length"] == kept


def made(full, mine, stopped, short, unanswered=0):
    """A study of streaming at 40 slots: grades of full, of it, and of its two controls.

    `unanswered`: so many texts of the control of the same length have no answer yet.
    """
    study = Study(policies=("streaming",), budgets=("40",)).resolved()
    rest = {"lookups_right": 1, "lookups": 1, "finish": "stop", "slots": 40, "max_slots": 40,
            "cache_bytes": 1, "state_bytes": 0, "seconds": 1, "tokens": [1],
            "sample": 0}  # fmt: skip
    rows = []
    for i in range(len(full)):
        own = {"problem": f"p{i}", "length": 9, **rest}
        cut = [{"length": n, "cut": n < 9, "answered": n > 2 and i >= unanswered,
                "lookups_right": 0, "lookups": 1, "correct": int(c)}
               for n, c in ((8, short[i]), (2, stopped[i]))]  # fmt: skip
        rows.append({"policy": FULL, "budget": FULL, "correct": int(full[i]), **own})
        told = {"controls": dict(zip((LENGTH, MEMORY), cut, strict=True))}
        rows.append({"policy": "streaming", "budget": "40", "correct": int(mine[i]), **own, **told})
    return study, rows


ONES, NONE = np.ones(40), np.zeros(40)
HALF = np.arange(40) % 2
LESS = (np.arange(40) % 4 == 1).astype(int)


def said(*grades, unanswered=0):
    study, rows = made(*grades, unanswered=unanswered)
    found = words.sentences(study, summarise(study, rows), rows)
    return [line for line in found if "full stopped" in line or "full cut" in line]


def test_a_policy_no_better_than_stopping_is_told():
    [line] = said(ONES, HALF, HALF, ONES)
    assert line == (
        "At 40 slots, full stopped where that memory is full reaches 50 (35 to 65) %. "
        "Not shown to be any better than so stopping: streaming."
    )
    assert "Worse than so stopping: streaming." in said(ONES, NONE, HALF, ONES)[0]
    assert said(ONES, HALF, LESS, ONES) == []


def test_a_loss_that_goes_with_length_is_told():
    [line] = said(ONES, HALF, NONE, HALF)
    assert "full cut to the same lengths does not differ significantly from streaming" in line
    [line] = said(ONES, HALF, NONE, LESS)
    assert line == "At 40 slots, full cut to the same lengths is behind streaming."
    assert said(ONES, ONES, NONE, ONES) == []


@pytest.mark.parametrize("unanswered", [1, 40])
def test_a_control_without_an_answer_says_nothing(unanswered):
    """Where the answer comes last, full cut to a policy's length has lost it to the cut."""
    assert said(ONES, HALF, NONE, HALF, unanswered=unanswered) == []
    assert said(ONES, HALF, NONE, LESS, unanswered=unanswered) == []
    study, rows = made(ONES, HALF, NONE, HALF, unanswered)
    cells = summarise(study, rows)
    headings, lines = report.table(study, cells)
    assert controls.shown(cells) == [MEMORY] and "− full, same length" not in headings
    assert lines[1][headings.index("− full, same memory")].startswith("+50 (")
    assert cells[1].controls[LENGTH].answered == 1 - unanswered / 40


def test_rows_that_do_not_say_whether_they_have_an_answer_say_nothing():
    study, rows = made(ONES, HALF, NONE, HALF)
    del rows[-1]["controls"][LENGTH]["answered"]
    assert controls.shown(summarise(study, rows)) == [MEMORY]
    rows[-1]["controls"][LENGTH]["cut"] = False  # nothing was lost
    assert controls.shown(summarise(study, rows)) == [LENGTH, MEMORY]


@pytest.mark.parametrize(
    ("task", "text", "answers"),
    [
        ("math500", r"so \boxed{4}", True),
        ("math500", r"so \boxed{4", False),
        ("gsm8k", "first 4 and then 5", False),
        ("gsm8k", "#### 12", False),
        ("gsm8k", "#### 12\n", True),
        ("gpqa-diamond", "Either (A) or (B)", False),
        ("gpqa-diamond", "Answer: B\nFor", True),
        ("gpqa-diamond", "Answer:", False),
        ("livecodebench", "```\nprint(1)\n```\n", True),
        ("livecodebench", "```\nprint(1)\n", False),
        ("ledger", "step #2 bob 7 answer", False),
        ("ledger", "step #3 answer 0", True),
    ],
)
def test_whether_a_text_that_breaks_off_has_its_answer(task, text, answers):
    assert TASKS[task].answers(text) is answers


def test_differences_are_paired_and_go_to_all_files(tmp_path):
    study, rows = made(ONES, HALF, LESS, ONES)
    found = analysis.analyse(study, rows)
    control = found.cells[1].controls[MEMORY]
    assert control.values["correct"].value == 0.25
    assert control.differences["correct"] == ACCURACY.difference(
        [row for row in rows if row["policy"] == "streaming"],
        [{"problem": f"p{i}", "sample": 0, "correct": c} for i, c in enumerate(LESS)],
    )
    assert (control.mean_length, control.cut) == (2, 1)
    analysis.write(tmp_path, study, found)
    with (tmp_path / "summary.csv").open() as file:
        full, mine = csv.DictReader(file)
    assert float(mine["correct_minus_full_same_memory"]) == 0.25
    assert (
        float(mine["full_same_length_correct"]) == 1 and full["full_same_length_correct"] == "nan"
    )
    assert float(mine["full_same_memory_length"]) == 2
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["cells"][1]["controls"][MEMORY]["values"]["correct"]["value"] == 0.25
    assert written["controls"] == controls.MEANINGS
    headings, lines = report.table(study, found.cells)
    place = headings.index("− full, same memory")
    assert lines[0][place] == "" and lines[1][place].startswith("+25 (")


def test_a_cell_with_rows_of_before_has_no_controls():
    study, rows = made(ONES, HALF, LESS, ONES)
    del rows[1]["controls"]
    cells = summarise(study, rows)
    assert cells[1].controls == {} and controls.shown(cells) == []
    assert not any("full cut" in line for line in words.sentences(study, cells, rows))
