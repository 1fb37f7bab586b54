"""How long the texts are that each cell wrote, as a box and a dot a sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary, by_cell
from kvpolicies.eval.tasks.measures import Row

WIDTH = 240
"""Of the picture, in pixels."""
DOTS = 64
"""Samples up to which each has its dot."""
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


def lengths(study: Study, cells: Sequence[Summary], rows: Sequence[Row]) -> dict[str, Any] | None:
    """A line a cell, all on one scale from 0 to the longest text; None where nothing is written."""
    if study.entry.forced or not rows:
        return None
    named = by_cell(rows)
    longest = max(row["length"] for row in rows) or 1
    lines = [_line(cell, named[cell.policy, cell.budget], longest) for cell in cells]
    return {"longest": longest, "width": WIDTH, "lines": lines}


def _line(cell: Summary, rows: Sequence[Row], longest: int) -> dict[str, Any]:
    found = np.array([row["length"] for row in rows])
    ends = [float(x) for x in np.quantile(found, _SHARES)]
    at = [round(WIDTH * x / longest, 1) for x in ends]
    dots = [round(WIDTH * int(x) / longest, 1) for x in np.sort(found)]
    return {
        "cell": cell,
        "at": at,
        "box": max(1.0, round(at[3] - at[1], 1)),
        "dots": dots if len(dots) <= DOTS else [],
        "mean": float(found.mean()),
        "median": ends[2],
        "most": ends[4],
    }
