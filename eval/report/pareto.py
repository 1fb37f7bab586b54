"""Quality against bytes: which cells are in the Pareto set, and the plot of all of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvpolicies.eval.display.bytesize import size
from kvpolicies.eval.report import plots
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary
from kvpolicies.eval.tasks.measures import Measure

NAME = "pareto"
_APART = 0.0115
"""Of the axis' length: what lies closer is moved apart."""


def total_bytes(cell: Summary) -> int:
    """What a cell holds of one sequence: cache and policy state."""
    return cell.cache_bytes + cell.state_bytes


def contests(cell: Summary) -> bool:
    """Whether a cell could be deployed as it is: told nothing, and within its budget."""
    return not cell.lookahead and not cell.beyond


def front(measure: Measure, cells: Sequence[Summary]) -> list[Summary]:
    """Cells that no other beats, by their estimates: no fewer bytes and no better; fewest first.

    Full takes part. Cells alike in both are in it together.
    """
    sign = 1 if measure.higher_is_better else -1
    points = [
        (cell, total_bytes(cell), sign * cell.values[measure.key].value)
        for cell in cells
        if contests(cell) and cell.values[measure.key].value == cell.values[measure.key].value
    ]
    found = [
        (held, cell)
        for cell, held, value in points
        if not any((h <= held and v > value) or (h < held and v >= value) for _, h, v in points)
    ]
    return [cell for _, cell in sorted(found, key=lambda pair: pair[0])]


def plot(study: Study, cells: Sequence[Summary]) -> dict[str, plots.Draw]:
    """The plot by its name, for plots.write_plots; none without cells."""
    return {NAME: partial(_draw, study=study, cells=cells)} if cells else {}


def _draw(axes: Any, study: Study, cells: Sequence[Summary], colours: dict[str, str]) -> None:
    """Every cell with its interval; the Pareto set ringed and joined by steps."""
    measure, scale = study.entry.measures[0], 100 if study.entry.measures[0].percent else 1
    sizes = np.log10([max(1, total_bytes(cell)) for cell in cells])
    pad = 0.06 * max(0.1, float(np.ptp(sizes)))
    low, high = float(sizes.min()) - pad, float(sizes.max()) + pad
    places = 10 ** spread(sizes, (high - low) * _APART)
    at = {id(cell): float(x) for cell, x in zip(cells, places, strict=True)}
    axes.set_xscale("log")
    axes.set_xlim(10**low, 10**high)
    for index, own in enumerate(plots.lines(cells).values()):
        for part in ([c for c in own if contests(c)], [c for c in own if not contests(c)]):
            look = {**plots.look(index), "label": own[0].label if own[0] in part else None}
            if part:
                _points(axes, part, at, measure, look)
    for cell in cells:
        if cell.is_full:
            look = {"color": colours["ink"], "marker": "d", "markersize": 7, "label": "full"}
            _points(axes, [cell], at, measure, look)
    best = front(measure, cells)
    xs = [at[id(cell)] for cell in best]
    ys = [scale * cell.values[measure.key].value for cell in best]
    axes.plot(xs, ys, drawstyle="steps-post", color=colours["ink"], linewidth=1, linestyle=":",
              zorder=1)  # fmt: skip
    axes.plot(xs, ys, "o", markersize=13, markerfacecolor="none", color=colours["ink"],
              markeredgewidth=1.1, linestyle="none", label="Pareto set")  # fmt: skip
    _ticks(axes, 10**low, 10**high)
    axes.set_xlabel("bytes of one sequence: cache and policy state, all layers")
    plots.scale_of(axes, measure)


def spread(places: np.ndarray, apart: float) -> np.ndarray:
    """[N] places moved as little as they must be to lie `apart` (least squares), order kept."""
    from scipy.optimize import isotonic_regression

    rank = np.argsort(places, kind="stable")
    steps = apart * np.arange(len(places))
    moved = np.empty(len(places))
    moved[rank] = isotonic_regression(places[rank] - steps).x + steps
    return moved


def _points(
    axes: Any, cells: Sequence[Summary], at: dict[int, float], measure: Measure, look: dict
) -> None:
    scale = 100 if measure.percent else 1
    values = [cell.values[measure.key] for cell in cells]
    ys = [scale * value.value for value in values]
    ends = np.array([[v.value - v.low for v in values], [v.high - v.value for v in values]])
    outside = not contests(cells[0])
    axes.errorbar(
        [at[id(cell)] for cell in cells],
        ys,
        yerr=scale * np.nan_to_num(np.maximum(ends, 0)),
        linewidth=0,
        elinewidth=1,
        capsize=0,
        markerfacecolor="none" if outside else look["color"],
        **{"markersize": 5, **look, "linestyle": "none"},
    )


def _ticks(axes: Any, low: float, high: float) -> None:
    steps = [x * 2.0**i for i in range(60) for x in (1, 1.5)]
    there = [x for x in steps if low <= x <= high]
    there = [x for x in there if np.log2(x) == int(np.log2(x))] if len(there) > 8 else there
    if len(there) < 2:  # all cells nearly alike: the axis' ends
        there = sorted({low * 1.0001, (low * high) ** 0.5, high / 1.0001})
    axes.set_xticks(there, [size(x) for x in there])
    axes.minorticks_off()
