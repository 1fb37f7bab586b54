"""Two pictures of a bench: tokens/s against the batch, and memory against the length."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpolicies.budget import BudgetSpec
from kvpolicies.eval.bench.run import THEIRS, BenchRow
from kvpolicies.eval.display.figures import LIGHT, MARKERS, new_figure, save
from kvpolicies.models.memory import predict

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


def throughput_against_batch(path: Path, rows: Sequence[BenchRow]) -> None:
    """One line a policy and budget; writes a PNG."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(_label(row), []).append((row.batch, row.tokens_s))
    _draw(path, lines, "rows decoded together", "new tokens a second")


def memory_against_length(
    path: Path, rows: Sequence[BenchRow], model: Any, like: BudgetSpec
) -> None:
    """Predicted cache and state of one sequence, prompt included; writes a PNG.

    Args:
        like: any of the budgets: their sinks and window.
    """
    cells = {_label(row): row for row in rows if row.policy != THEIRS}
    lines = {}
    for label, row in cells.items():
        points, budget = [], replace(like, text=row.budget or "100%")
        for length in LENGTHS:
            held = predict(model, row.policy, budget, 1, row.prompt, length)
            points.append((length, (held.cache + held.state) / 1e6))
        lines[label] = points
    _draw(path, lines, "new tokens", "cache and policy state of one sequence (MB)", log=True)


def _label(row: BenchRow) -> str:
    return f"{row.policy} @ {row.budget}" if row.budget else row.policy


def _draw(
    path: Path,
    lines: dict[str, list[tuple[float, float]]],
    below: str,
    beside: str,
    log: bool = False,
) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    for index, (label, points) in enumerate(lines.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker=MARKERS[index % len(MARKERS)], label=label)
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.4)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path, LIGHT["paper"])
