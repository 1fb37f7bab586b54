"""What a sample of problems proves about a mean: one-sided bounds that hold for few problems too.

A percentile bootstrap of 24 problems without a single loss has no width: it would prove a loss of
zero. Yet a policy that loses 5 % of all problems shows none of it on 24 three times in ten. The
bound here is the Bayesian bootstrap with one more problem, the worst there could be:

    the alpha-quantile of  sum_i W_i x_i + W_0 worst,   (W_0, ..., W_n) ~ Dirichlet(1, ..., 1)

(Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a
nonnegative variable"; Learned-Miller and Thomas, arXiv 1905.06208.) For right and wrong it is
Clopper and Pearson's exact bound, so that no failure among n proves no more than 1 - alpha^(1/n);
for many problems it is the bootstrap's. That it holds for every bounded distribution is a
conjecture which nobody has seen fail; the tests try it by simulation.

The unit is the problem: `values` are means over its samples.
"""

import math
from collections.abc import Sequence

import numpy as np

from kvpolicies.eval.stats.intervals import CONFIDENCE, RESAMPLES, Interval

TAIL = 100
"""Draws beyond a bound: their share is then known to a tenth."""
_CHUNK = 1 << 21


def draw_means(values: np.ndarray, worst: float, level: float, seed: int) -> np.ndarray:
    """Plausible means, [draws, C], of C variables [C, P] on the same P problems.

    Args:
        worst: the end of the variables' range that a bound has to fear.
        level: the smallest tail that will be asked of the draws.
    """
    columns, problems = values.shape
    count = min(200_000, max(5_000, math.ceil(TAIL / level)))
    points = np.concatenate([values.T, np.full((1, columns), worst)])
    rng = np.random.default_rng([seed, problems])
    parts = []
    size = max(1, _CHUNK // (problems + 1))
    for start in range(0, count, size):
        weights = rng.standard_exponential((min(size, count - start), problems + 1))
        parts.append(weights @ points / weights.sum(axis=1, keepdims=True))
    return np.concatenate(parts)


def lower(draws: np.ndarray, level: float) -> np.ndarray:
    """[C]: what each mean is not below, but for `level` of all studies."""
    rank = max(0, math.floor(level * len(draws)) - 1)
    return np.partition(draws, rank, axis=0)[rank]


def upper(draws: np.ndarray, level: float) -> np.ndarray:
    """[C]: what each mean is not above, but for `level` of all studies."""
    return -lower(-draws, level)


def mean_over_tasks(values: Sequence[np.ndarray], seed: int) -> Interval:
    """The mean of the tasks' means, with a percentile bootstrap of each task's problems.

    Args:
        values: of each task, [P].
    """
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for x in values:
        counts = rng.multinomial(len(x), np.full(len(x), 1 / len(x)), size=RESAMPLES)
        total += counts @ x / len(x)
    value = float(np.mean([x.mean() for x in values]))
    if min(len(x) for x in values) == 1:
        return Interval(value, math.nan, math.nan)
    ends = np.quantile(total / len(values), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(ends[0]), float(ends[1]))
