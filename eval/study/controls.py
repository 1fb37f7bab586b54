"""Two controls made of full's own samples, cut: what a policy owes to its length, and to evicting.

    same_length   full, stopped after as many new tokens as the policy wrote in the same sample
    same_memory   full, stopped where prompt and new tokens fill the policy's budget (the last of
                  them needs no slot): what the same slots give to those who evict nothing and stop

Cutting is exact. `full` under a smaller limit of new tokens writes the beginning of what it wrote,
since a sample's random numbers do not depend on the limit; so the cut tokens are decoded and graded
as if they were all. Grades are kept in the row of the policy's sample that they are a control of.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvpolicies.budget import BudgetSpec
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.eval.study.prompts import StudyRequest
from kvpolicies.eval.study.results import FULL, Key
from kvpolicies.eval.tasks.measures import Measure, Row
from kvpolicies.eval.tasks.task import Problem, Task
from kvpolicies.generation import Generation

if TYPE_CHECKING:
    from kvpolicies.eval.study.summary import Summary

LENGTH, MEMORY = "same_length", "same_memory"
NAMES = {LENGTH: "full, same length", MEMORY: "full, same memory"}
MEANINGS = {
    LENGTH: "full, stopped after as many new tokens as this policy wrote in the same sample; "
    "shown only where each text so cut has its answer by then",
    MEMORY: "full, stopped where prompt and new tokens fill the slots of this cell "
    "(a policy's own state comes on top of them)",
}


class RowSource(Protocol):
    """Where full's rows come from: they grow while a study runs."""

    rows: list[dict[str, Any]]


class Cuts:
    """Full's samples, cut and graded again; each cut once, whoever asks for it.

    Args:
        decode: new tokens to the text that is graded.
    """

    def __init__(self, task: Task, kept: RowSource, decode: Callable[[Sequence[int]], str]) -> None:
        self.task, self.kept, self.decode = task, kept, decode
        self._full: dict[Key, Row] = {}
        self._seen = 0
        self._made: dict[tuple[Key, int], Row] = {}

    def of(self, request: StudyRequest, made: Generation, budget: BudgetSpec) -> dict[str, Row]:
        """The controls of one sample of a policy at `budget`: length and grades of each."""
        asked = budget.of(request.length).total
        # A paper's own rule holds more slots than were asked for, a charged state is worth some.
        slots = max(asked, made.budget_total)
        room = slots - made.prompt_tokens + 1  # the last token is chosen, and never stored
        limits = {LENGTH: len(made.tokens), MEMORY: max(0, room)}
        row = self._row(Key(FULL, FULL, request.problem.id, request.sample))
        return {name: self._cut(request.problem, row, limit) for name, limit in limits.items()}

    def _row(self, key: Key) -> Row:
        for row in self.kept.rows[self._seen :]:
            if row["policy"] == FULL:
                self._full[Key.of(row)] = row
        self._seen = len(self.kept.rows)
        return self._full[key]

    def _cut(self, problem: Problem, row: Row, limit: int) -> Row:
        length = min(limit, row["length"])
        if length == row["length"]:
            grades = {name: row[name] for name in _graded(self.task.measures)}
            return {"length": length, "cut": False, **grades}
        if (Key.of(row), length) not in self._made:
            text = self.decode(row["tokens"][:length])
            told = {"answered": self.task.answers(text), **self.task.grade(problem, text)}
            self._made[Key.of(row), length] = told
        return {"length": length, "cut": True, **self._made[Key.of(row), length]}


@dataclass(frozen=True)
class Control:
    """One control of one cell, over the samples of the cell."""

    values: dict[str, Interval]
    """By measure."""
    differences: dict[str, Interval]
    """The cell minus its control, paired by problem; for measures that are compared with full."""
    mean_length: float
    """New tokens."""
    cut: float
    """Share of samples in which full had more to say."""
    answered: float
    """Share of samples that were not cut, or whose text has its answer nevertheless."""
    tells: bool
    """Whether it says anything of the cell."""


def of_cell(measures: Sequence[Measure], rows: Sequence[Row], seed: int) -> dict[str, Control]:
    """The controls of a cell by name; none of full, of lookaheads, and where a row has none."""
    found = {}
    for name in NAMES:
        made = [
            {"problem": row["problem"], "sample": row["sample"], **row["controls"][name]}
            for row in rows
            if name in row.get("controls", {})
        ]
        if rows and len(made) == len(rows):
            found[name] = _control(name, measures, rows, made, seed)
    return found


def _control(
    name: str, measures: Sequence[Measure], rows: Sequence[Row], made: Sequence[Row], seed: int
) -> Control:
    answered = sum(not row["cut"] or row.get("answered", False) for row in made) / len(made)
    return Control(
        values={item.key: item.estimate(made, seed) for item in measures},
        differences={
            item.key: item.difference(rows, made) for item in measures if item.against_full
        },
        mean_length=sum(row["length"] for row in made) / len(made),
        cut=sum(row["cut"] for row in made) / len(made),
        answered=answered,
        # Who stops at a memory has no answer then. A length is no way to stop: where the answer
        # comes last, full cut to one has lost it to the cut, and compares with nothing.
        tells=name == MEMORY or answered == 1,
    )


def columns(measures: Sequence[Measure], controls: Mapping[str, Control]) -> dict[str, float]:
    """A cell's entries in summary.csv, by their headings."""
    entries: dict[str, float] = {}
    for name, control in controls.items():
        shown = {f"full_{name}_{item.key}": control.values[item.key] for item in measures}
        for key, gap in control.differences.items():
            shown[f"{key}_minus_full_{name}"] = gap
        for heading, interval in shown.items():
            entries |= zip((heading, f"{heading}_low", f"{heading}_high"), interval, strict=True)
        entries[f"full_{name}_length"] = control.mean_length
        entries[f"full_{name}_answered"] = control.answered
    return entries


def _graded(measures: Sequence[Measure]) -> list[str]:
    """The fields of a row that grading made."""
    return list(dict.fromkeys(name for m in measures for name in (m.key, m.per) if name))


def shown(cells: Sequence["Summary"]) -> list[str]:
    """Which controls a study's table has."""
    return [name for name in NAMES if any(_told(cell, name) for cell in cells)]


def _told(cell: "Summary", name: str) -> bool:
    return name in cell.controls and cell.controls[name].tells


def gap(measure: Measure, cell: "Summary", name: str) -> tuple[str, float] | None:
    """The cell minus its control, as the table says it, and its value; None where that is nothing.

    A cell has no such control, or one that does not tell.
    """
    if not _told(cell, name) or measure.key not in cell.controls[name].differences:
        return None
    found = cell.controls[name].differences[measure.key]
    return measure.show(found, signed=True), found.value
