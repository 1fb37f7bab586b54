"""How many problems, or samples of each, would let the data decide.

With the mean m and the spread s of a variable over problems as they were seen, a bound at level
alpha clears a threshold m - g with a chance of about `POWER` or more from n problems on, where

    (z(1 - alpha) + z(POWER)) s / sqrt(n) + r log(1 / alpha) / n = g

The first term is the textbook's for a paired difference, with problems as the unit (see Miller,
"Adding Error Bars to Evals", arXiv 2411.00640). The second is what a bound costs that fears the
worst, at a distance r from the mean, though nobody has seen it: without any spread, n problems
prove a mean to within r (1 - alpha^(1/n)), or nearly r log(1 / alpha) / n. The tests hold both by
simulation. The future is taken to be like the past: with few problems, s is a rough guess.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

POWER = 0.8


@dataclass(frozen=True)
class Need:
    """What is missing for a bound to clear its threshold, if things stay as they were seen."""

    problems: int
    """Of each task in all, those at hand included."""
    samples: int | None
    """Of each of the problems at hand, in all; None if no number would do, or none can be told.

    Samples shrink what varies within a problem, never what varies between problems.
    """
    measured: tuple[int, int]
    """Problems and samples at hand."""


def problems_needed(spread: float, gap: float, reach: float, level: float) -> int:
    """Problems from which a bound clears a threshold with a chance of `POWER`.

    Args:
        spread: standard deviation between problems. gap: mean less threshold, above 0.
        reach: mean less the worst possible value.
        level: the bound's own chance of error.
    """
    a = (norm.ppf(1 - level) + norm.ppf(POWER)) * spread
    root = (a + math.sqrt(a * a + 4 * gap * reach * math.log(1 / level))) / (2 * gap)
    return math.ceil(root * root)


def need(values: Sequence[np.ndarray], threshold: float, worst: float, level: float) -> Need | None:
    """What the data lack to prove a mean above `threshold`; None if theirs is not above it.

    Args:
        values: of each task, [P, S]; the mean is that of the tasks' means.
    """
    mean = float(np.mean([x.mean() for x in values]))
    gap, reach = mean - threshold, mean - worst
    if gap <= 1e-9:
        return None
    problems, samples = (max(x.shape[axis] for x in values) for axis in (0, 1))
    within = [float(x.var(axis=1, ddof=1).mean()) / x.shape[1] for x in values if x.shape[1] > 1]
    total = sum(_variance(x.mean(axis=1)) for x in values) / len(values) ** 2
    count = problems_needed(math.sqrt(total), gap, reach, level)
    more = None
    if len(within) == len(values):
        part = min(total, sum(within) / len(values) ** 2)
        for factor in (2**k for k in range(1, 8)):
            spread = math.sqrt(total - part + part / factor)
            if problems_needed(spread, gap, reach, level) <= problems:
                more = factor * samples
                break
    return Need(max(count, problems + 1), more, (problems, samples))


def _variance(x: np.ndarray) -> float:
    return float(x.var(ddof=1)) if len(x) > 1 else 0.0
