"""Plots of a study: each measure against the budget, one line a policy, 95 % bands.

Colours and markers both tell policies apart. Every plot comes in a light and a dark form.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicies.eval.measures import Measure
from kvpolicies.eval.study import Study
from kvpolicies.eval.summary import Summary

MARKERS = "osD^vP*Xph<>"
LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "grid": "#d8dee4"}
DARK = {"paper": "#161b22", "ink": "#e6edf3", "grid": "#30363d"}


def write_plots(folder: Path, study: Study, summaries: Sequence[Summary]) -> dict[str, Path]:
    """Writes one PNG a measure and colour scheme; {"<measure>-<light|dark>": path}."""
    written = {}
    for measure in study.entry.measures:
        for scheme, colours in (("light", LIGHT), ("dark", DARK)):
            name = f"{measure.key}-{scheme}"
            path = folder / (f"{measure.key}.png" if scheme == "light" else f"{name}.png")
            _plot(path, measure, summaries, colours)
            written[name] = path
    return written


def _plot(
    path: Path, measure: Measure, summaries: Sequence[Summary], colours: dict[str, str]
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.6), dpi=140, layout="constrained", facecolor=colours["paper"])
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=colours["paper"])
    ticks: dict[float, str] = {}
    for index, (policy, cells) in enumerate(_lines(summaries).items()):
        _line(axes, index, policy, cells, measure)
        ticks.update({cell.slots: cell.budget for cell in cells if not cell.beyond})
    for cell in summaries:
        if cell.is_full and ticks:
            _full(axes, cell, measure, colours["ink"])
    _dress(axes, measure, ticks, colours)
    figure.savefig(path, facecolor=colours["paper"], metadata={"Software": None})


def _lines(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Cells by policy, each from small to large budgets; the best at the largest budget first."""
    lines: dict[str, list[Summary]] = {}
    for cell in summaries:
        if not cell.is_full:
            lines.setdefault(cell.policy, []).append(cell)
    return {policy: sorted(cells, key=lambda c: c.slots) for policy, cells in lines.items()}


def _line(axes: Any, index: int, policy: str, cells: list[Summary], measure: Measure) -> None:
    from matplotlib import colormaps

    scale = 100 if measure.percent else 1
    slots = [cell.slots for cell in cells]
    shown = [cell.values[measure.key] for cell in cells]
    colour = colormaps["tab10"](index % 10)
    axes.plot(
        slots,
        [scale * value.value for value in shown],
        color=colour,
        marker=MARKERS[index % len(MARKERS)],
        linestyle=("-", "--", ":")[index // 10 % 3],
        label=cells[0].label,
        markersize=5,
        linewidth=1.6,
    )
    axes.fill_between(
        slots,
        [scale * value.low for value in shown],
        [scale * value.high for value in shown],
        color=colour,
        alpha=0.13,
        linewidth=0,
    )


def _full(axes: Any, cell: Summary, measure: Measure, ink: str) -> None:
    scale = 100 if measure.percent else 1
    value = cell.values[measure.key]
    axes.axhline(scale * value.value, color=ink, linestyle="--", linewidth=1.2, label="full")
    if value.low == value.low:
        axes.axhspan(scale * value.low, scale * value.high, color=ink, alpha=0.07, linewidth=0)


def _dress(axes: Any, measure: Measure, ticks: dict[float, str], colours: dict[str, str]) -> None:
    ink = colours["ink"]
    if ticks:
        axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlabel("budget (slots a KV head holds at most)", color=ink)
    axes.set_ylabel(measure.heading + (" (%)" if measure.percent else ""), color=ink)
    if measure.percent:
        axes.set_ylim(-3, 103)
    axes.grid(axis="y", color=colours["grid"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=ink)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours["grid"])
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        labelcolor=ink,
        fontsize=8.5,
    )
