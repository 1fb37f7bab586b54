"""Problem by problem: which cell got which problem right, or how well it did on it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpolicies.eval.report import sorting as order
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary, by_cell
from kvpolicies.eval.tasks.measures import Measure, Row

MOST_PROBLEMS = 500
MOST_MARKS = 40_000
"""Of a page: more would make it slow to scroll."""
SHADES = 9


class GridMark(NamedTuple):
    """One problem at one cell: a class of the style, a sign, and the figure in words."""

    kind: str
    sign: str
    title: str


def grid(study: Study, cells: Sequence[Summary], rows: Sequence[Row]) -> dict[str, Any]:
    """What the page's grid shows: groups of columns by budget, and a line a problem."""
    measure = study.entry.measures[0]
    cells = order.by_budget(study, cells)
    named = by_cell(rows)
    sums = [measure.sums(named[cell.policy, cell.budget]) for cell in cells]
    problems = order.by_name({problem for column in sums for problem in column})
    most = min(MOST_PROBLEMS, max(1, MOST_MARKS // max(1, len(cells))))
    shown = problems[:most]
    low, high = _range([*sums])
    lines = []
    for problem in shown:
        there = [column[problem] for column in sums if problem in column]
        above, below = sum(a for a, _ in there), sum(b for _, b in there)
        marks = [
            _mark(measure, cell, column.get(problem), (low, high))
            for cell, column in zip(cells, sums, strict=True)
        ]
        mean = above / below if below else math.nan
        lines.append({"problem": problem, "mean": mean, "said": figure(measure, mean),
                      "marks": marks})  # fmt: skip
    groups: list[dict[str, Any]] = []
    for cell in cells:
        if not groups or groups[-1]["budget"] != cell.budget:
            groups.append({"budget": cell.budget, "full": cell.is_full, "cells": []})
        groups[-1]["cells"].append(cell)
    return {
        "binary": measure.binary, "heading": measure.heading, "groups": groups, "lines": lines,
        "left_out": len(problems) - len(shown), "several": study.samples > 1,
        "low": figure(measure, low), "high": figure(measure, high),
        "better": "higher" if measure.higher_is_better else "lower",
    }  # fmt: skip


def _range(sums: Sequence[dict[str, tuple[float, float]]]) -> tuple[float, float]:
    values = [a / b for column in sums for a, b in column.values() if b]
    return (min(values), max(values)) if values else (math.nan, math.nan)


def _mark(
    measure: Measure, cell: Summary, found: tuple[float, float] | None, ends: tuple[float, float]
) -> GridMark:
    head = order.title(cell)
    if found is None or not found[1]:
        return GridMark("none", "", f"{head}: no sample")
    above, below = found
    if measure.binary:
        title = f"{head}: right in {above:.0f} of {below:.0f}"
        if above in (0, below):
            return GridMark("right", "✓", title) if above else GridMark("wrong", "✗", title)
        return GridMark(f"s{_shade(above / below, 0, 1)}", f"{above:.0f}", title)
    value = above / below
    said = figure(measure, value)
    return GridMark(f"s{_shade(value, *ends)}", said, f"{head}: {said}")


def _shade(value: float, low: float, high: float) -> int:
    return round(SHADES * (value - low) / (high - low)) if high > low else SHADES


def figure(measure: Measure, value: float) -> str:
    """One value of a measure, short: percentages without their sign."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:.0f}" if measure.percent else f"{value:.2f}"
