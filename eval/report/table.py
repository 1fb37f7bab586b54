"""The study's table: for the terminal, the page and table.tex."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvpolicies.eval.display.bytesize import size
from kvpolicies.eval.study import controls, lookahead
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import SPEED, Summary


class Entry(NamedTuple):
    """One entry of a table: what it says, and by what it is sorted."""

    text: str
    value: float | str


def table(study: Study, summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """(headings, lines) of the table that the page and the terminal show."""
    lines = [[x.text for x in line] for line in entries(study, summaries)]
    return headings(study, summaries), lines


def headings(study: Study, summaries: Sequence[Summary]) -> list[str]:
    """What stands above the columns of `entries`."""
    said = ["policy", "budget"]
    for item in study.entry.measures:
        said.append(item.heading + (" %" if item.percent else ""))
        if item.against_full:
            said.append("− full")
    said += [f"− {controls.NAMES[name]}" for name in controls.shown(summaries)]
    said += ["most slots", "cache", "policy state"]
    return [*said, SPEED] if _timed(summaries) else said


def entries(study: Study, summaries: Sequence[Summary]) -> list[list[Entry]]:
    """The lines of the table."""
    with_controls, timed = controls.shown(summaries), _timed(summaries)
    return [_line(study, cell, with_controls, timed) for cell in summaries]


def _timed(summaries: Sequence[Summary]) -> bool:
    return any(not math.isnan(cell.cpu_ms) for cell in summaries)


def _line(study: Study, cell: Summary, with_controls: Sequence[str], timed: bool) -> list[Entry]:
    line = [Entry(cell.label, cell.policy)]
    line.append(Entry("–" if cell.is_full else cell.budget, cell.slots))
    for item in study.entry.measures:
        value = cell.values[item.key]
        line.append(Entry(item.show(value), value.value))
        if item.against_full:
            gap = cell.differences[item.key]
            text = "" if cell.is_full else item.show(gap, signed=True)
            line.append(Entry(text, 0.0 if cell.is_full else gap.value))
    for name in with_controls:
        gap = controls.gap(study.entry.measures[0], cell, name)
        line.append(Entry(*gap) if gap else Entry("", ""))
    line += [Entry(_slots(cell), cell.max_slots)]
    line += [Entry(size(count), count) for count in (cell.cache_bytes, cell.state_bytes)]
    if timed:
        known = not math.isnan(cell.cpu_ms)
        line.append(Entry(f"{cell.cpu_ms:.3g}", cell.cpu_ms) if known else Entry("", ""))
    return line


def _slots(cell: Summary) -> str:
    if cell.over_budget:
        return f"{cell.max_slots} (over budget)"
    return str(cell.max_slots)


def notes(study: Study, summaries: Sequence[Summary]) -> list[str]:
    """What the table's columns and marks mean."""
    said = [
        "− full: this cell minus full on the same problems, in "
        + ("nats" if study.entry.forced else "percentage points")
        + ". An interval without width means that all problems differed alike, or none did: few "
        "problems may agree by chance.",
        "most slots: the largest number that any head of any layer held in any sample. "
        "cache: keys, values and positions of one sequence, all layers, as allocated. "
        "policy state: what the policy keeps besides, of one sequence, all layers.",
    ]
    if _timed(summaries):
        said.append(
            f"{SPEED}: milliseconds of the processor a new token, all threads of this process, up "
            f"to {study.batch_size} sequences at once. Prefill and scoring are in it; what else "
            "the machine did is not, but for the caches and clocks that it shared. "
            "`kvpolicies bench` measures speed."
        )
    said[1:1] = [
        f"{controls.NAMES[name]}: {controls.MEANINGS[name]}." for name in controls.shown(summaries)
    ]
    if study.entry.forced:
        said.insert(0, "Budgets are shares of each problem's prompt and solution together.")
    if any(cell.lookahead for cell in summaries):
        said.insert(0, lookahead.note(study.entry.forced))
    return said
