"""What differences a study could detect, and how many problems and samples the next one needs.

Two policies answer n samples of each of P problems with common random numbers. Let d be the gap of
one sample (1, 0 or -1 for right answers): its mean over samples differs from problem to problem
(`between`, a variance), and d differs from sample to sample of one problem (`within`). The mean
gap then has the variance

    (between + within / n) / P

and a two-sided test at level a tells a true gap with chance 1 - b if it is at least

    (t(1 - a/2) + t(1 - b)) root of that + 2 / (n P)

The first term is the sample-size formula of Miller, "Adding Error Bars to Evals" (arXiv 2411.00640,
section 5), with Student's quantiles, P - 1 degrees of freedom, for its normal ones, and with
samples paired too: there the samples of the two models are independent, and `within` is the sum of
their variances. The second is what an exact test of counts may lose: flipping a sign moves their
sum by two at least, so its critical value may lie so far beyond a continuous one's. The tests hold
the promise by simulation.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

ALPHA = 0.05
"""Chance of calling two equal policies different."""
CHANCE = 0.8
"""Chance of telling a difference that is there (the power)."""
POINTS = 0.03
"""The difference that a note is made for: 3 points."""
SAMPLES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Spread:
    """Variances of the gap between two policies, and the correlation of their problem means.

    `between` is that of the problems' true gaps, `within` that of one sample's gap inside a
    problem: nan where each problem has one sample, and `between` then holds both.
    """

    between: float
    within: float
    correlation: float
    """Pearson's, of the two policies' means over problems; nan where one of them is constant."""

    def variance(self, samples: float) -> float:
        """Variance of one problem's mean gap over so many samples; nan where that is not known."""
        if math.isnan(self.within):
            return self.between if samples == 1 else math.nan
        return self.between + self.within / samples

    def detectable(self, problems: int, samples: float) -> float:
        """The smallest true difference that is told with chance `CHANCE`.

        nan where it is not known, nothing having differed included: that is no proof that nothing
        can.
        """
        variance = self.variance(samples)
        if not variance > 0 or problems < 2:
            return math.nan
        quantiles = stdtrit(problems - 1, 1 - ALPHA / 2) + stdtrit(problems - 1, CHANCE)
        return float(quantiles) * math.sqrt(variance / problems) + 2 / (samples * problems)

    def problems(self, points: float, samples: float) -> int | None:
        """Problems that tell a true difference of `points` (0.03 = 3 points); None = not known."""
        if not self.variance(samples) > 0:
            return None
        most = 2
        while self.detectable(most, samples) > points:
            most *= 2
        tried = range(2, most + 1)
        return tried[bisect_left(tried, -points, key=lambda p: -self.detectable(p, samples))]


@dataclass(frozen=True)
class Power:
    """The power note of a study of so many `problems`: for its median pair, by its `spread`."""

    problems: int
    samples: int
    """Samples a problem, of this study."""
    pair: tuple[str, str, str]
    """Policy, policy and budget of the median pair."""
    spread: Spread
    detectable: float
    """The smallest difference that this study tells with chance 0.8 at level 0.05."""
    needed: dict[int, int]
    """{samples a problem: problems} that tell 3 points; this study's own number of samples alone
    where it has but one, from which the two variances cannot be separated."""


UNKNOWN = Spread(math.nan, math.nan, math.nan)


def spread(
    gaps: Sequence[Sequence[float]], mine: Sequence[float], theirs: Sequence[float]
) -> Spread:
    """The spread of a pair.

    Args:
        gaps: for each problem the gaps of its samples; [P] lists.
        mine: [P], one policy's mean on each problem.
        theirs: [P], the other's.

    The components are those of a one-way analysis of variance: within, the mean of the problems'
    sample variances; between, the variance of the problems' means less within / n, at least 0.
    """
    counts = np.array([len(g) for g in gaps], dtype=float)
    means = np.array([np.mean(g) for g in gaps])
    total = float(np.var(means, ddof=1)) if len(means) > 1 else math.nan
    several = [g for g in gaps if len(g) > 1]
    within = float(np.mean([np.var(g, ddof=1) for g in several])) if several else math.nan
    between = total if not several else max(0.0, total - within * float(np.mean(1 / counts)))
    constant = len(means) < 2 or np.ptp(mine) == 0 or np.ptp(theirs) == 0
    correlation = math.nan if constant else float(np.corrcoef(mine, theirs)[0, 1])
    return Spread(between, within, correlation)


def needed(spread: Spread, samples: int) -> dict[int, int]:
    """{samples a problem: problems} that tell `POINTS`, for this number and others of samples."""
    found = {n: spread.problems(POINTS, n) for n in sorted({*SAMPLES, samples})}
    return {n: problems for n, problems in found.items() if problems is not None}
