"""Texts side by side: what each cell wrote on a few problems, and what it had dropped by then."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from kvpolicies.eval.display.escape import visible
from kvpolicies.eval.report import grid
from kvpolicies.eval.report import sorting as order
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import FULL, Summary, by_cell
from kvpolicies.eval.study.texts import KEY, POINTS
from kvpolicies.eval.tasks.measures import Measure, Row

MOST_PROBLEMS = 6
MOST_TOKENS = 60_000
"""Of all texts on a page, past which no further problem is shown."""
MOST_SIGNS = 4000
"""Of a text whose tokens were not recorded."""

Column = dict[str, Row]
"""By problem, the first sample's row."""


@dataclass(frozen=True)
class SampleText:
    """One cell's text on one problem."""

    title: str
    verdict: str
    facts: str
    asked: Markup
    """The prompt's tokens; empty where they were not recorded."""
    written: Markup
    levels: str
    """For each point a string of digits, one a token; "" where none were recorded."""


def samples(study: Study, cells: Sequence[Summary], rows: Sequence[Row]) -> dict[str, Any] | None:
    """What the page shows of texts; None where there is none to show."""
    cells = order.by_budget(study, cells)
    named = by_cell([row for row in rows if row["sample"] == 0])
    columns = [
        {row["problem"]: row for row in named.get((cell.policy, cell.budget), [])} for cell in cells
    ]
    recorded = {row["problem"] for row in rows if KEY in row}
    if not recorded and (study.entry.forced or not any(row.get("text") for row in rows)):
        return None
    candidates = recorded or {row["problem"] for row in rows}
    ranked = _ranked(study.entry.measures[0], cells, columns, candidates)
    shown = _fitting(ranked, columns)
    full = next((c for cell, c in zip(cells, columns, strict=True) if cell.policy == FULL), {})
    return {
        "recorded": len(recorded),
        "candidates": len(candidates),
        "agree": not any(spread for spread, _ in ranked),
        "points": [round(100 * point) for point in POINTS],
        "problems": [_problem(study, cells, columns, full, problem) for problem in shown],
        "measure": study.entry.measures[0].heading,
    }


def _ranked(
    measure: Measure, cells: Sequence[Summary], columns: Sequence[Column], problems: set[str]
) -> list[tuple[float, str]]:
    """(variance over cells of the measure on it, problem), the largest first, then by name."""
    ranked = []
    for problem in order.by_name(problems):
        here = [
            above / below
            for cell, column in zip(cells, columns, strict=True)
            if problem in column and not cell.lookahead
            for above, below in measure.sums([column[problem]]).values()
            if below
        ]
        ranked.append((round(float(np.var(here)), 12) if here else 0.0, problem))
    return sorted(ranked, key=lambda pair: -pair[0])


def _fitting(ranked: Sequence[tuple[float, str]], columns: Sequence[Column]) -> list[str]:
    """The first problems of `ranked` that a page can hold; at least one."""
    shown, total = [], 0
    for _, problem in ranked[:MOST_PROBLEMS]:
        here = [column[problem] for column in columns if problem in column]
        total += sum(_tokens(row) for row in here)
        if shown and total > MOST_TOKENS:
            break
        shown.append(problem)
    return shown


def _tokens(row: Row) -> int:
    """How many tokens of a row a page shows, roughly."""
    if KEY in row:
        return len(row[KEY]["pieces"])
    return min(MOST_SIGNS, len(row.get("text") or "")) // 4


def _problem(
    study: Study, cells: Sequence[Summary], columns: Sequence[Column], full: Column, problem: str
) -> dict[str, Any]:
    pairs = zip(cells, columns, strict=True)
    made = [_text(study, c, column[problem], full.get(problem)) for c, column in pairs
            if problem in column]  # fmt: skip
    return {"name": problem, "texts": made}


def _text(study: Study, cell: Summary, row: Row, full: Row | None) -> SampleText:
    measure = study.entry.measures[0]
    above, below = next(iter(measure.sums([row]).values()))
    if measure.binary:
        verdict = "✓ right" if above else "✗ wrong"
    else:
        verdict = f"{measure.heading} {grid.figure(measure, above / below if below else math.nan)}"
        verdict += " %" if measure.percent else ""
    same = None if cell.is_full or full is None or row.get("mode") else _agreement(row, full)
    facts = [f"{row['length']:,} tokens"]
    if not study.entry.forced:
        facts.append("cut off" if row["finish"] == "length" else "ended by itself")
    if row.get("mode"):
        facts.append(str(row["mode"]))
    elif same is not None and not study.entry.forced:
        whole = same == len(row["tokens"]) == len(full["tokens"] if full else [])
        facts.append("the same as full's" if whole else f"as full's up to token {same:,}")
    title = order.title(cell)
    if KEY not in row:
        return SampleText(title, verdict, ", ".join(facts), Markup(), _cut(row), "")
    held = row[KEY]
    asked, written = _pieces(held, None if study.entry.forced else same)
    return SampleText(title, verdict, ", ".join(facts), asked, written, "|".join(held["levels"]))


def _agreement(row: Row, full: Row) -> int:
    """How many tokens of both are the same, from the first on."""
    pairs = list(zip(row["tokens"], full["tokens"], strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _pieces(held: Mapping[str, Any], departs: int | None) -> tuple[Markup, Markup]:
    """Prompt and new tokens as elements, with what was held at the end of the text.

    `departs`: the new token from which the text is no longer full's.
    """
    levels, (before, hidden) = held["levels"][-1], held["gap"]
    mark = None if departs is None else held["prompt"] + departs
    if mark is not None and hidden:  # pieces behind the gap have moved up
        mark = mark if mark < before else max(before, mark - hidden)
    made = []
    for i, piece in enumerate(held["pieces"]):
        if hidden and i == before:
            made.append(Markup("<b>… {:,} tokens not shown …</b>").format(hidden))
        kind = f"h{levels[i]}" if i < len(levels) else "hx"
        kind += " from" if i == mark else ""
        made.append(Markup('<i class="{}">{}</i>').format(kind, visible(piece)))
        if i + 1 == held["prompt"]:
            made.append(Markup("\0"))
    asked, _, written = Markup("").join(made).partition("\0")
    return Markup(asked), Markup(written)


def _cut(row: Row) -> Markup:
    text = row.get("text") or ""
    left = len(text) - MOST_SIGNS
    more = f"\n… {left:,} characters not shown" if left > 0 else ""
    return escape(visible(text[:MOST_SIGNS]) + more)
