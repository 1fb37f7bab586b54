"""Intervals: Wilson for proportions, bootstrap over problems for shares and paired differences.

Samples of one problem are not independent, nor are the look-ups of one trace: the unit that is
resampled is always the problem. Every interval is a 95 % interval of one comparison; nothing is
corrected for the number of comparisons. The bootstrap is seeded, hence reproducible.

Shapes: arrays are [P], one entry a problem.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

LEVEL = 0.95
RESAMPLES = 4999


class Interval(NamedTuple):
    """An estimate and the ends of its 95 % interval (nan where none can be given)."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def overlaps(self, other: "Interval") -> bool:
        """True if the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high


def wilson(successes: int, total: int) -> Interval:
    """The share `successes / total` with Wilson's score interval (1927), for independent trials."""
    if total == 0:
        return Interval(math.nan, math.nan, math.nan)
    low, high = stats.binomtest(successes, total).proportion_ci(LEVEL, method="wilson")
    return Interval(successes / total, float(low), float(high))


def share(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> Interval:
    """sum(numerators) / sum(denominators) with a percentile bootstrap interval over problems."""
    return _bootstrap(numerators, denominators, seed)


def paired_difference(
    numerators: Sequence[float],
    reference: Sequence[float],
    denominators: Sequence[float],
    seed: int,
) -> Interval:
    """sum(numerators - reference) / sum(denominators), the same problems resampled for both.

    An interval of no width means that no problem differed (or all by the same), not that the
    difference is known exactly.
    """
    gaps = np.asarray(numerators, dtype=float) - np.asarray(reference, dtype=float)
    return _bootstrap(gaps, denominators, seed)


def proportion(correct: Sequence[float], samples: Sequence[float], seed: int) -> Interval:
    """The share of correct samples: Wilson's where each problem has one, else bootstrap."""
    if all(count == 1 for count in samples):
        return wilson(round(sum(correct)), len(correct))
    return share(correct, samples, seed)


def _ratio(numerators: np.ndarray, denominators: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.sum(numerators, axis=axis) / np.sum(denominators, axis=axis)


def _bootstrap(numerators: ArrayLike, denominators: ArrayLike, seed: int) -> Interval:
    data = (np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float))
    if data[0].size == 0 or data[1].sum() == 0:
        return Interval(math.nan, math.nan, math.nan)
    value = float(_ratio(*data))
    if data[0].size == 1:  # one problem says nothing about the spread between problems
        return Interval(value, math.nan, math.nan)
    result = stats.bootstrap(
        data,
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    ends = result.confidence_interval
    return Interval(value, float(ends.low), float(ends.high))
