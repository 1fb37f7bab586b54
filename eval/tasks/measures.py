"""What a study measures: which fields of a result row become which column, and how.

A measure is a ratio of two sums over samples, with a 95 % interval clustered by problem (`stats`).
Everything that reads results (table, plot, words) goes through these rows of data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicies.eval.stats import intervals as stats
from kvpolicies.eval.stats.intervals import Interval

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """sum(row[key] * row[weight]) / sum(row[per] * row[weight]) over the rows of a cell.

    Empty names stand for 1. `binary`: each row is right or wrong, so Wilson's interval applies.
    `against_full`: the paired difference to full is shown too (full's own value is no zero).
    """

    key: str
    heading: str
    per: str = ""
    weight: str = ""
    binary: bool = False
    percent: bool = True
    higher_is_better: bool = True
    against_full: bool = True
    name: str = ""
    """For sentences, where the heading will not do."""

    @property
    def singular(self) -> str:
        return self.name or self.heading

    @property
    def most(self) -> float:
        """The largest difference that two values can have: percentages are of shares."""
        return 1.0 if self.percent else math.inf

    def sums(self, rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
        """{problem: (numerator, denominator)} over the samples of each problem."""
        found: dict[str, tuple[float, float]] = {}
        for row in rows:
            weight = row[self.weight] if self.weight else 1
            above, below = found.get(row["problem"], (0.0, 0.0))
            per = row[self.per] if self.per else 1
            found[row["problem"]] = (above + row[self.key] * weight, below + per * weight)
        return found

    def estimate(self, rows: Sequence[Row], seed: int) -> Interval:
        """The measure of one cell."""
        above, below = _columns(self.sums(rows).values())
        return stats.proportion(above, below) if self.binary else stats.share(above, below, seed)

    def pass_at(self, rows: Sequence[Row]) -> dict[int, Interval]:
        """pass@k of one cell, k = 2, 4, 8, ... and the number of samples; of binary measures only.

        Where problems differ in their number of samples (a study that is not finished), up to the
        least.
        """
        if not self.binary or not rows:
            return {}
        right, made = _columns(self.sums(rows).values())
        most = int(min(made))
        powers = {1 << i for i in range(1, most.bit_length())}
        return {k: stats.pass_at(k, right, made) for k in sorted(powers | {most}) if k > 1}

    def difference(self, rows: Sequence[Row], others: Sequence[Row]) -> Interval:
        """This cell minus another, paired by problem; samples that both have count."""
        return stats.paired_difference(*self.paired(rows, others), most=self.most)

    def paired(
        self, rows: Sequence[Row], others: Sequence[Row]
    ) -> tuple[list[float], list[float], list[float]]:
        """([P] of this cell, [P] of the other, [P] denominators) over samples that both have."""
        there = {_sample(row): row for row in others}
        common = [row for row in rows if _sample(row) in there]
        mine, theirs = self.sums(common), self.sums([there[_sample(row)] for row in common])
        above, below = _columns(mine.values())
        reference, _ = _columns(theirs[problem] for problem in mine)
        return above, reference, below

    def sample_gaps(self, rows: Sequence[Row], others: Sequence[Row]) -> list[list[float]]:
        """[P] lists: row[key] of this cell minus the other's, for each sample that both have."""
        there = {_sample(row): row for row in others}
        found: dict[str, list[float]] = {}
        for row in rows:
            if other := there.get(_sample(row)):
                found.setdefault(row["problem"], []).append(row[self.key] - other[self.key])
        return list(found.values())

    def show(self, interval: Interval, *, signed: bool = False) -> str:
        """`58 (43 to 71)`: percentages without their sign, other figures with three digits."""
        one = self._one(interval.value, signed)
        if interval.low != interval.low:
            return one
        return f"{one} ({self._one(interval.low, signed)} to {self._one(interval.high, signed)})"

    def _one(self, value: float, signed: bool) -> str:
        if value != value:
            return "–"
        text = f"{100 * value:.0f}" if self.percent else f"{value:.3f}"
        text = text.removeprefix("-") if float(text) == 0 else text
        return "+" + text if signed and float(text) > 0 else text.replace("-", "−")


EXACT = Measure("correct", "exact answers", binary=True, name="share of exact answers")
ACCURACY = Measure("correct", "accuracy", binary=True)
LOOKUPS = Measure("lookups_right", "look-ups right", per="lookups", against_full=False)
TOP1 = Measure("top1", "top-1 agreement", weight="length", against_full=False)
KL = Measure(
    "kl",
    "KL from full",
    weight="length",
    percent=False,
    higher_is_better=False,
    against_full=False,
    name="divergence from full (nats a token)",
)
NLL = Measure("nll", "NLL", weight="length", percent=False, higher_is_better=False)


def _sample(row: Row) -> tuple[str, int]:
    return row["problem"], row["sample"]


def _columns(pairs: Any) -> tuple[list[float], list[float]]:
    listed = list(pairs)
    return [above for above, _ in listed], [below for _, below in listed]
