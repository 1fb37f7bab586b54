"""The first screen: one sentence a budget, the curves, a table of policies by budget, one warning.

Who differs is decided by the corrected tests of all pairs (`study.pairs`). overview.j2 has the
words, overview.html.j2 the drawing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicies.eval.display.figures import DASHES, PALETTE
from kvpolicies.eval.display.pages import macros
from kvpolicies.eval.report.analysis import Analysis
from kvpolicies.eval.report.plots import lines
from kvpolicies.eval.study import asked
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.pairs import Pair
from kvpolicies.eval.study.summary import FULL, Summary
from kvpolicies.eval.tasks.measures import Measure

_SAID = Path(__file__).with_name("overview.j2")
RANDOM = "random"
WIDTH, HEIGHT = 600, 380
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 12, 40
"""Of the drawing, in its own units."""
SHAPES = ("circle", "square", "diamond", "up", "down", "cross")


class Verdict(NamedTuple):
    """Contestants at one budget, by what the corrected tests say of each against the reference."""

    budget: str
    reference: str
    """`full`; the best policy where a measure is not compared with full."""
    ahead: list[str]
    level: list[str]
    """Not significantly different."""
    behind: list[str]


def verdicts(study: Study, found: Analysis) -> list[Verdict]:
    """One a budget at which some policy took part."""
    measure, said = study.entry.measures[0], []
    for budget in study.budgets:
        cells = _contestants(found.cells, budget)
        if not cells:
            continue
        reference = FULL if measure.against_full else _best(measure, cells).policy
        known = {(pair.a, pair.b): pair for pair in found.pairs if pair.budget == budget}
        parts: dict[int, list[str]] = {1: [], 0: [], -1: []}
        for cell in cells:
            if cell.policy != reference:
                parts[_sign(measure, known, cell.policy, reference)].append(cell.policy)
        said.append(Verdict(budget, reference, parts[1], parts[0], parts[-1]))
    return said


def answers(study: Study, found: Analysis) -> list[str]:
    """One sentence a budget."""
    say = macros(_SAID)
    return [say.answer(verdict) for verdict in verdicts(study, found)]


@dataclass(frozen=True)
class BoardEntry:
    """One policy at one budget."""

    text: str
    title: str
    best: bool
    """Whether it is the best there, or not significantly different from it."""


@dataclass(frozen=True)
class BoardLine:
    """One policy at all budgets, and how it is drawn."""

    policy: str
    label: str
    colour: str
    dash: str
    shape: str
    entries: list[BoardEntry | None]


def board(study: Study, found: Analysis) -> list[BoardLine]:
    """A line a policy: full, then contestants by their mean over budgets, then the others."""
    measure, by_policy = study.entry.measures[0], lines(found.cells)
    best = {
        budget: _best(measure, cells)
        for budget in study.budgets
        if (cells := _contestants(found.cells, budget))
    }
    looks = {policy: _look(i) for i, policy in enumerate(_drawn(by_policy))}
    made = []
    for policy, cells in by_policy.items():
        at = {cell.budget: cell for cell in cells}
        entries = [_entry(measure, found, at.get(b), best.get(b)) for b in study.budgets]
        made.append(BoardLine(policy, cells[0].label, *looks.get(policy, _GREY), entries))
    made.sort(key=lambda line: _rank(measure, by_policy[line.policy]))
    full = next((cell for cell in found.cells if cell.is_full), None)
    if full and measure.against_full:
        value = measure.show(full.values[measure.key])
        entry = BoardEntry(_short(measure, full), f"full: {value}", False)
        made.insert(0, BoardLine(FULL, FULL, "var(--ink)", "4 3", "", [entry] * len(study.budgets)))
    return made


def table(study: Study, found: Analysis) -> tuple[list[str], list[list[str]]]:
    """(headings, lines) of the board for a terminal; a star stands behind what is best."""
    measure = study.entry.measures[0]
    lines = [
        [line.label, *((f"{e.text}{'*' if e.best else ' '}" if e else "") for e in line.entries)]
        for line in board(study, found)
    ]
    return [f"{measure.heading}{' %' if measure.percent else ''} at", *study.budgets], lines


def chart(study: Study, found: Analysis) -> dict[str, Any]:
    """What the drawing needs: axes, bands of full and random, a line a policy."""
    measure, by_policy = study.entry.measures[0], lines(found.cells)
    cells = [cell for cell in found.cells if not cell.is_full]
    full = next((cell for cell in found.cells if cell.is_full), None)
    scale = _Scale.of(measure, found.cells)
    looks = {policy: _look(i) for i, policy in enumerate(_drawn(by_policy))}
    # Budgets of as many slots, of other bits or shared out otherwise, have one place and label.
    ticks = {
        scale.x(cell.slots): cell.budget.partition(":")[0] for cell in cells if not cell.beyond
    }
    return {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT,
        "bottom": HEIGHT - BOTTOM, "measure": measure,
        "ticks": [(text, x) for x, text in ticks.items()], "levels": scale.levels,
        "full": scale.band(full) if full and measure.against_full else None,
        "random": scale.area(by_policy[RANDOM]) if RANDOM in by_policy else "",
        "lines": [
            {"policy": policy, "look": looks.get(policy, _GREY),
             "points": [scale.point(cell) for cell in by_policy[policy]],
             "titles": [f"{c.label} @ {c.budget}: {measure.show(c.values[measure.key])}"
                        for c in by_policy[policy]]}
            for policy in by_policy
        ],
    }  # fmt: skip


def warning(study: Study, found: Analysis, told: Mapping[str, Any] | None) -> str:
    """One line of what must be known first: truncation, unknown words, problems needed."""
    full = next((cell for cell in found.cells if cell.is_full), None)
    cautions = asked.cautions(told) if told else []
    problems = max((cell.problems for cell in found.cells), default=0)
    needed = found.power.needed.get(found.power.samples) if found.power else None
    return macros(_SAID).warning(full, study.entry.forced, cautions, problems, needed)


_GREY = ("var(--soft)", "2 3", "")


def _drawn(by_policy: Mapping[str, Sequence[Summary]]) -> list[str]:
    """Policies with a colour of their own: all but the control."""
    return [policy for policy in by_policy if policy != RANDOM]


def _look(index: int) -> tuple[str, str, str]:
    colour = PALETTE[index % len(PALETTE)]
    return colour, DASHES[index // len(PALETTE) % len(DASHES)], SHAPES[index % len(SHAPES)]


def _contestants(cells: Sequence[Summary], budget: str) -> list[Summary]:
    return [c for c in cells if c.budget == budget and not (c.is_full or c.lookahead or c.beyond)]


def _value(measure: Measure, cell: Summary) -> float:
    """Higher is better; nan, of no sample, is the worst."""
    value = cell.values[measure.key].value * (1 if measure.higher_is_better else -1)
    return -math.inf if math.isnan(value) else value


def _best(measure: Measure, cells: Sequence[Summary]) -> Summary:
    return max(cells, key=lambda cell: _value(measure, cell))


def _rank(measure: Measure, cells: Sequence[Summary]) -> tuple[bool, float]:
    outside = all(cell.lookahead or cell.beyond for cell in cells)
    return outside, -sum(_value(measure, cell) for cell in cells) / len(cells)


def _sign(measure: Measure, known: Mapping[tuple[str, str], Pair], one: str, other: str) -> int:
    """1 where `one` is significantly better than the other, -1 worse, 0 neither."""
    pair, turn = known.get((one, other)), 1
    if pair is None:
        pair, turn = known.get((other, one)), -1
    if pair is None or not pair.told_apart:
        return 0
    better = (pair.difference.value > 0) == measure.higher_is_better
    return turn if better else -turn


def _entry(
    measure: Measure, found: Analysis, cell: Summary | None, best: Summary | None
) -> BoardEntry | None:
    if cell is None:
        return None
    own = not (cell.lookahead or cell.beyond) and best is not None
    known = {(p.a, p.b): p for p in found.pairs if p.budget == cell.budget}
    level = own and best is not None and not _sign(measure, known, cell.policy, best.policy)
    title = f"{cell.label} @ {cell.budget}: {measure.show(cell.values[measure.key])}"
    return BoardEntry(_short(measure, cell), title, level)


def _short(measure: Measure, cell: Summary) -> str:
    value = cell.values[measure.key]
    return measure.show(value._replace(low=math.nan))


@dataclass(frozen=True)
class _Scale:
    """From slots and values to the drawing's units."""

    slots: tuple[float, float]
    values: tuple[float, float]
    measure: Measure

    @classmethod
    def of(cls, measure: Measure, cells: Sequence[Summary]) -> "_Scale":
        slots = [cell.slots for cell in cells if not cell.is_full] or [0.0]
        shown = [x for c in cells for x in c.values[measure.key] if not math.isnan(x)]
        ends = (0.0, 1.0) if measure.percent else (min(shown, default=0), max(shown, default=1))
        return cls((min(slots), max(slots)), ends, measure)

    def x(self, slots: float) -> float:
        low, high = self.slots
        share = (slots - low) / (high - low) if high > low else 0.5
        return round(LEFT + 16 + share * (WIDTH - LEFT - RIGHT - 32), 1)

    def y(self, value: float) -> float:
        low, high = self.values
        share = (value - low) / (high - low) if high > low else 0.5
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    @property
    def levels(self) -> list[tuple[str, float]]:
        low, high = self.values
        found = [low + i * (high - low) / 4 for i in range(5)]
        return [
            (f"{100 * v:.0f}" if self.measure.percent else f"{v:.2g}", self.y(v)) for v in found
        ]

    def point(self, cell: Summary) -> tuple[float, float]:
        return self.x(cell.slots), self.y(cell.values[self.measure.key].value)

    def band(self, cell: Summary) -> tuple[float, float, float]:
        """(upper end, value, lower end) of one cell's interval."""
        value, low, high = cell.values[self.measure.key]
        both = (high, low) if low == low else (value, value)
        return self.y(both[0]), self.y(value), self.y(both[1])

    def area(self, cells: Sequence[Summary]) -> str:
        """The points of a band of intervals along the budgets."""
        upper = [(self.x(c.slots), self.band(c)[0]) for c in cells]
        lower = [(self.x(c.slots), self.band(c)[2]) for c in reversed(cells)]
        return " ".join(f"{x},{y}" for x, y in upper + lower)
