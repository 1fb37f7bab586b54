"""The pictures of an analysis, each as a light and a dark PNG.

distances  attention by distance, local against global queries    (the paper's Fig. 1)
heads      share of global queries by layer and head              (Fig. 3)
queries    cosines of queries before RoPE, and their PCA           (Fig. 4)
losses     share of revisits whose keys each policy had evicted
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicies.eval.display.figures import DARK, LIGHT, MARKERS, new_figure, save
from kvpolicies.eval.revisit.attention import BINS, bounds
from kvpolicies.eval.revisit.summary import CLASSES

_LOCAL, _GLOBAL = "#4c78a8", "#e4572e"
CAPTIONS = {
    "distances": "Attention of a mean query by distance, the first tokens (sinks) apart.",
    "heads": "Share of global queries by layer and query head.",
    "queries": "Queries of one head before RoPE: cosines (local first, then global, each in "
    "order of position), and their first two principal axes.",
    "losses": "Share of the attention of revisits that went to keys already evicted, with 95 % "
    "intervals over traces.",
}


def write_figures(
    folder: Path, summary: Mapping[str, Any], picture: Mapping[str, Any]
) -> dict[str, Path]:
    """Writes the PNGs; {"<name>-<light|dark>": path}, `losses` only where there are some."""
    draw: dict[str, Callable[..., None]] = {"distances": _distances, "heads": _heads}
    draw["queries"] = lambda figure, summary, colours: _queries(figure, picture, colours)
    if summary["losses"]:
        draw["losses"] = _losses
    written = {}
    for name, draw_on in draw.items():
        for scheme, colours in (("light", LIGHT), ("dark", DARK)):
            path = folder / (f"{name}.png" if scheme == "light" else f"{name}-dark.png")
            _draw(path, lambda figure, c=colours, d=draw_on: d(figure, summary, c), colours)
            written[f"{name}-{scheme}"] = path
    return written


def _draw(path: Path, draw: Callable[[Any], None], colours: Mapping[str, str]) -> None:
    figure = new_figure((8.2, 4.0), 110, colours)
    draw(figure)
    for axes in figure.axes:
        _dress(axes, colours)
    save(figure, path, colours["paper"])


def _dress(axes: Any, colours: Mapping[str, str]) -> None:
    axes.set_facecolor(colours["paper"])
    axes.tick_params(colors=colours["ink"])
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(colours["ink"])
    for spine in axes.spines.values():
        spine.set_color(colours["grid"])
    legend = axes.get_legend()
    for text in legend.get_texts() if legend else ():
        text.set_color(colours["ink"])


def _distances(figure: Any, summary: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    axes = figure.add_subplot()
    longest = max(trace["length"] for trace in summary["traces"])
    places = [i for i in range(BINS - 1) if bounds(i)[0] < longest]
    names = [f"{low}" if low == high else f"{low}–{high}" for low, high in map(bounds, places)]
    for offset, name, colour in zip((-0.2, 0.2), CLASSES, (_LOCAL, _GLOBAL), strict=True):
        heights = [100 * (summary["distances"][name][i] or 0) for i in (*places, BINS - 1)]
        at = np.arange(len(heights)) + offset
        axes.bar(at, heights, 0.4, color=colour, label=f"{name} queries")
    axes.set_xticks(range(len(names) + 1), [*names, "sinks"], rotation=45, ha="right")
    axes.set_xlabel("distance (tokens)")
    axes.set_ylabel("attention (%)")
    axes.legend(frameon=False)


def _heads(figure: Any, summary: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    axes = figure.add_subplot()
    shares = 100 * np.asarray(summary["heads"][summary["config"]["definition"]])
    image = axes.imshow(shares.T, aspect="auto", cmap="viridis", vmin=0, vmax=100, origin="lower")
    some = range(0, len(shares), max(1, len(shares) // 16))
    axes.set_xticks(some, [summary["layers"][i] for i in some])
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer")
    axes.set_ylabel("query head")
    figure.colorbar(image, ax=axes).set_label("global queries (%)")


def _queries(figure: Any, picture: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    left, right = figure.subplots(1, 2)
    kinds = np.asarray(picture["global"])
    order = np.argsort(kinds, kind="stable")
    cosines = np.asarray(picture["cosine"])[np.ix_(order, order)]
    image = left.imshow(cosines, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    edge = int((kinds == 0).sum()) - 0.5
    left.axhline(edge, color=_DIVIDER, linewidth=1)
    left.axvline(edge, color=_DIVIDER, linewidth=1)
    left.set_xlabel("queries: local, then global")
    left.set_title(f"layer {picture['layer']}, head {picture['head']}: cosines", fontsize=9)
    figure.colorbar(image, ax=left, shrink=0.8)
    points = np.asarray(picture["pca"])
    for kind, name, colour in zip((0, 1), CLASSES, (_LOCAL, _GLOBAL), strict=True):
        own = points[kinds == kind]
        right.scatter(own[:, 0], own[:, 1], s=9, color=colour, label=f"{name} ({len(own)})")
    for axis, share in zip(("x", "y"), picture["variance"], strict=True):
        getattr(right, f"set_{axis}label")(f"{100 * share:.0f} % of the variance")
    right.set_title("PCA", fontsize=9)
    right.legend(frameon=False, fontsize=8)


_DIVIDER = "#111111"
_ENDS = ("value", "low", "high")


def _losses(figure: Any, summary: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    from matplotlib import colormaps

    axes = figure.add_subplot()
    budgets = list(dict.fromkeys(line["budget"] for line in summary["losses"]))
    policies = list(dict.fromkeys(line["policy"] for line in summary["losses"]))
    for number, policy in enumerate(policies):
        own = [line for line in summary["losses"] if line["policy"] == policy]
        offset = (number - (len(policies) - 1) / 2) * 0.7 / len(policies)
        at = [budgets.index(line["budget"]) + offset for line in own]
        shares = np.array([[line["mass"][end] for end in _ENDS] for line in own], dtype=float)
        value, low, high = 100 * shares.T  # NaN where there is none, which is not drawn
        ends = np.maximum(np.nan_to_num([value - low, high - value]), 0)
        axes.errorbar(
            at, value, ends, color=colormaps["tab10"](number % 10), linestyle="",
            marker=MARKERS[number % len(MARKERS)], capsize=2, label=policy,
        )  # fmt: skip
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlim(-0.6, len(budgets) - 0.4)
    axes.set_ylim(-3, 103)
    axes.set_xlabel("budget")
    axes.set_ylabel("attention of revisits lost (%)")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def pages(written: Mapping[str, Path]) -> Sequence[str]:
    """Names of the pictures that were written, in order."""
    return [name for name in CAPTIONS if f"{name}-light" in written]
