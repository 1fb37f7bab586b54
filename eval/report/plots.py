"""Plots of a study: each measure against the budget, one line a policy, 95 % bands.

Colours and markers both tell policies apart. Every plot is a PNG, and an SVG that takes the page's
colours, light or dark.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvpolicies.eval.display.figures import LIGHT, MARKERS, PALETTE, new_figure, save
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary
from kvpolicies.eval.tasks.measures import Measure

CSS = {"paper": "paper", "ink": "ink", "grid": "line"}
"""What the page's style calls these colours."""

Draw = Callable[..., None]
"""Draws on axes, in `colours`."""


def write_plots(folder: Path, draws: Mapping[str, Draw]) -> dict[str, str]:
    """Writes one PNG a plot, for print; the same plots as SVG for a page, by name.

    A page's plot takes its ink, lines and paper from the page's style.
    """
    return {name: _both(folder / f"{name}.png", name, draw) for name, draw in draws.items()}


def against_budget(study: Study, summaries: Sequence[Summary]) -> dict[str, Draw]:
    """A plot a measure of the study, by the measure's key."""
    return {
        measure.key: partial(_against_budget, measure=measure, summaries=summaries)
        for measure in study.entry.measures
    }


def lines(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Cells by policy, each from small to large budgets; full is none of them."""
    found: dict[str, list[Summary]] = {}
    for cell in summaries:
        if not cell.is_full:
            found.setdefault(cell.policy, []).append(cell)
    return {policy: sorted(cells, key=lambda c: c.slots) for policy, cells in found.items()}


def look(index: int) -> dict[str, Any]:
    """Colour, marker and line of a study's policy number `index`."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": ("-", "--", ":")[index // len(PALETTE) % 3],
    }


def scale_of(axes: Any, measure: Measure) -> None:
    """The vertical axis of a measure."""
    axes.set_ylabel(measure.heading + (" (%)" if measure.percent else ""))
    if measure.percent:
        axes.set_ylim(-3, 103)


def _both(path: Path, name: str, draw: Draw) -> str:
    """Saves a plot as PNG at `path`, and returns it as SVG."""
    from matplotlib import rc_context

    # Names stand as they are: `$` begins no formula. Ids in two plots of a page must differ.
    plain: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": name}
    with rc_context(plain):
        figure = new_figure()
        axes = figure.add_subplot(facecolor=LIGHT["paper"])
        draw(axes, colours=LIGHT)
        _dress(axes, LIGHT)
        save(figure, path, LIGHT["paper"])
        text = io.StringIO()
        figure.savefig(text, format="svg", facecolor=LIGHT["paper"], metadata={"Date": None})
    return _for_a_page(text.getvalue())


def _for_a_page(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1">', svg, flags=re.S)
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{CSS[name]})")
    return svg.strip()


def _against_budget(
    axes: Any, measure: Measure, summaries: Sequence[Summary], colours: dict[str, str]
) -> None:
    ticks: dict[float, str] = {}
    for index, (policy, cells) in enumerate(lines(summaries).items()):
        _line(axes, index, policy, cells, measure)
        ticks.update({cell.slots: cell.budget for cell in cells if not cell.beyond})
    for cell in summaries:
        if cell.is_full and ticks:
            _full(axes, cell, measure, colours["ink"])
    if ticks:
        axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlabel("budget (slots a KV head holds at most)")
    scale_of(axes, measure)


def _line(axes: Any, index: int, policy: str, cells: list[Summary], measure: Measure) -> None:
    scale = 100 if measure.percent else 1
    slots = [cell.slots for cell in cells]
    shown = [cell.values[measure.key] for cell in cells]
    own = look(index)
    axes.plot(
        slots,
        [scale * value.value for value in shown],
        **own,
        label=cells[0].label,
        markersize=5,
        linewidth=1.6,
    )
    axes.fill_between(
        slots,
        [scale * value.low for value in shown],
        [scale * value.high for value in shown],
        color=own["color"],
        alpha=0.13,
        linewidth=0,
    )


def _full(axes: Any, cell: Summary, measure: Measure, ink: str) -> None:
    scale = 100 if measure.percent else 1
    value = cell.values[measure.key]
    axes.axhline(scale * value.value, color=ink, linestyle="--", linewidth=1.2, label="full")
    if value.low == value.low:
        axes.axhspan(scale * value.low, scale * value.high, color=ink, alpha=0.07, linewidth=0)


def _dress(axes: Any, colours: dict[str, str]) -> None:
    ink = colours["ink"]
    axes.xaxis.label.set_color(ink)
    axes.yaxis.label.set_color(ink)
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
