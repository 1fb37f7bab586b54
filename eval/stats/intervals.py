"""Intervals and tests, all clustered by problem: Wilson, t, bootstrap, sign flips, pass@k, Holm.

Samples of one problem are not independent, nor are the look-ups of one trace: the unit that is
resampled, flipped or counted is always the problem. Every interval is a 95 % interval of one
comparison; `holm` corrects p-values for their number. What is random is seeded.

Shapes: arrays are [P], one entry a problem.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy  # its parts load when they are first used; stats takes a second
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
RESAMPLES = 4999
FLIPS = 9999
"""Sign patterns of a test whose gaps are no whole numbers: all of them up to 13 problems."""


class Interval(NamedTuple):
    """An estimate, its `value`, and the ends of its 95 % interval, `low` and `high`.

    The ends are nan where none can be given.
    """

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside of the interval."""
        return self.low > 0 or self.high < 0

    def overlaps(self, other: "Interval") -> bool:
        """True if the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high


def wilson(successes: float, total: float) -> Interval:
    """The share `successes / total` with Wilson's score interval (1927), for independent trials.

    Fractions are allowed: `total` may be an effective number of trials.
    """
    if total == 0:
        return Interval(math.nan, math.nan, math.nan)
    share, z2 = successes / total, scipy.special.ndtri((1 + CONFIDENCE) / 2) ** 2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    spread = z2 * (share * (1 - share) / total + z2 / (4 * total**2))
    half = math.sqrt(max(0.0, spread)) / (1 + z2 / total)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def clustered(sums: Sequence[float], sizes: Sequence[float], trials: float) -> Interval:
    """sum(sums) / sum(sizes), a share in [0, 1], with Wilson's interval at its effective size.

    The effective size is share (1 - share) / v: v the variance of the share between problems (that
    of a ratio estimator), times (z / t)^2, t Student's quantile with P - 1 degrees of freedom (Korn
    and Graubard, Survey Methodology 24, 1998; with Wilson's interval: Dean and Pagano, Journal of
    Survey Statistics and Methodology 3, 2015). It lies between P, as if all samples of a problem
    were one, and `trials`, the number of samples, as if all were independent; where every sample
    agrees, and v is nothing, it is P.
    """
    above, below = np.asarray(sums, dtype=float), np.asarray(sizes, dtype=float)
    if above.size == 0 or below.sum() == 0:
        return Interval(math.nan, math.nan, math.nan)
    share = float(above.sum() / below.sum())
    if above.size == 1:  # one problem says nothing about the spread between problems
        return Interval(share, math.nan, math.nan)
    count = above.size
    v = count / (count - 1) * ((above - share * below) ** 2).sum() / below.sum() ** 2
    size = share * (1 - share) / v if v > 0 else count
    size = min(max(size, count), max(trials, count))
    tail = (1 + CONFIDENCE) / 2
    size *= (scipy.special.ndtri(tail) / scipy.special.stdtrit(count - 1, tail)) ** 2
    return Interval(share, *wilson(share * size, size)[1:])


def proportion(correct: Sequence[float], samples: Sequence[float]) -> Interval:
    """The share of correct samples: Wilson's where each problem has one, else `clustered`."""
    if all(count == 1 for count in samples):
        return wilson(sum(correct), len(correct))
    return clustered(correct, samples, sum(samples))


def pass_at(k: int, correct: Sequence[float], samples: Sequence[float]) -> Interval:
    """pass@k: the chance that one of k samples of a problem is right, mean over problems.

    Of each problem with n samples, c right: 1 - C(n - c, k) / C(n, k), which is unbiased (Chen et
    al., arXiv 2107.03374, equation 1), where the more obvious 1 - (1 - c / n)^k is not. The
    interval is `clustered`.

    Raises:
        ValueError: a problem has fewer than k samples, or k < 1.
    """
    right, made = np.asarray(correct, dtype=float), np.asarray(samples, dtype=float)
    if k < 1 or (made < k).any():
        raise ValueError(f"pass@{k} needs at least {k} samples of every problem, and k >= 1")
    passed = 1 - scipy.special.binom(made - right, k) / scipy.special.binom(made, k)
    return clustered(list(passed), [1.0] * passed.size, made.sum())


def share(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> Interval:
    """sum(numerators) / sum(denominators) with a percentile bootstrap interval over problems."""
    return _bootstrap(numerators, denominators, seed)


def paired_difference(
    numerators: Sequence[float],
    reference: Sequence[float],
    denominators: Sequence[float],
    most: float = math.inf,
) -> Interval:
    """sum(numerators - reference) / sum(denominators), with a cluster-robust interval.

    The interval ends at -`most` and `most`, beyond which no difference can lie: 1 for two shares.

    Student's t with P - 1 degrees of freedom on the problems' gaps: the variance of a ratio
    estimator between problems, which holds whatever the correlation within one (Cameron and Miller,
    Journal of Human Resources 50, 2015). An interval of no width means that no problem differed (or
    all by the same), not that the difference is known exactly.
    """
    gaps = np.asarray(numerators, dtype=float) - np.asarray(reference, dtype=float)
    below = np.asarray(denominators, dtype=float)
    if gaps.size == 0 or below.sum() == 0:
        return Interval(math.nan, math.nan, math.nan)
    value, count = float(gaps.sum() / below.sum()), gaps.size
    if count == 1:
        return Interval(value, math.nan, math.nan)
    variance = count / (count - 1) * ((gaps - value * below) ** 2).sum() / below.sum() ** 2
    half = float(scipy.special.stdtrit(count - 1, (1 + CONFIDENCE) / 2) * math.sqrt(variance))
    return Interval(value, max(-most, value - half), min(most, value + half))


def sign_flip(gaps: Sequence[float], seed: int) -> float:
    """Two-sided p-value of "the two policies are alike": a problem's gap is as likely its opposite.

    Fisher's paired randomisation test, the problem its unit. Exact for whole-number gaps (counts of
    right answers): the distribution over all 2^P sign patterns is made by convolution. Other gaps
    have all their patterns where these are few, else `FLIPS` drawn ones beside the one that was
    seen, so that p is never too small. nan without problems, 1 without a gap.
    """
    known = np.asarray(gaps, dtype=float)
    if known.size == 0:
        return math.nan
    differing = known[known != 0]
    if differing.size == 0:
        return 1.0
    if (differing == differing.round()).all() and np.abs(differing).sum() <= 1 << 16:
        return _flipped_counts(np.abs(differing).astype(int), abs(int(differing.sum())))
    found = scipy.stats.permutation_test(
        (differing,),
        lambda x, axis: np.abs(np.sum(x, axis=axis)),
        permutation_type="samples",
        alternative="greater",
        vectorized=True,
        n_resamples=FLIPS,
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def _flipped_counts(sizes: np.ndarray, seen: int) -> float:
    """P(|sum of randomly signed sizes| >= seen)."""
    chances = np.ones(1)  # of each sum from -reach to reach
    for size in sizes:
        step = np.zeros(2 * size + 1)
        step[0] = step[-1] = 0.5
        chances = np.convolve(chances, step)
    reach = len(chances) // 2
    far = np.abs(np.arange(-reach, reach + 1)) >= seen
    return min(1.0, float(chances[far].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values such that rejecting those below a keeps the chance of any false one below a.

    Holm's step-down correction (Scandinavian Journal of Statistics 6, 1979): the i-th smallest of m
    is multiplied by m - i + 1, and none falls below a smaller one's. nan stays nan, uncounted.
    """
    p = np.asarray(p_values, dtype=float)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    corrected = np.full(p.shape, np.nan)
    steps = p[order] * np.arange(order.size, 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return [float(value) for value in corrected]


def _ratio(numerators: np.ndarray, denominators: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.sum(numerators, axis=axis) / np.sum(denominators, axis=axis)


def _bootstrap(numerators: ArrayLike, denominators: ArrayLike, seed: int) -> Interval:
    data = (np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float))
    if data[0].size == 0 or data[1].sum() == 0:
        return Interval(math.nan, math.nan, math.nan)
    value = float(_ratio(*data))
    if data[0].size == 1:  # one problem says nothing about the spread between problems
        return Interval(value, math.nan, math.nan)
    result = scipy.stats.bootstrap(
        data,
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    ends = result.confidence_interval
    return Interval(value, float(ends.low), float(ends.high))
