"""Every policy against every other at the same budget: paired by problem, tested, corrected.

One comparison is one `Pair`; the study's first measure is compared. Differences have the interval
of one comparison; `p` is the sign-flip test's, `p_holm` the same after Holm's correction over all
pairs of the study, so that calling every pair with `p_holm` < 0.05 different is wrong somewhere in
at most 5 % of studies whose policies are alike.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low

from kvpolicies import files
from kvpolicies.eval.stats import intervals as stats
from kvpolicies.eval.stats import power
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.eval.stats.power import Power, Spread
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import FULL, Cells, by_cell
from kvpolicies.eval.tasks.measures import Measure, Row

NAME = "pairs.csv"


@dataclass(frozen=True)
class Pair:
    """Policy `a` minus policy `b` at one `budget` (full has none and meets every budget's cells).

    The `difference` is one of the study's first `measure`, paired by problem, over so many
    `problems`; `spread` has the variances of its gap.
    """

    measure: str
    a: str
    b: str
    budget: str
    problems: int
    samples: int
    """Samples that both have, over all problems."""
    difference: Interval
    p: float
    """Of one two-sided sign-flip test; nan where there is no problem."""
    p_holm: float
    """Corrected for the number of pairs in the study."""
    spread: Spread
    detectable: float
    """The smallest true difference that these problems and samples tell with chance 0.8; nan where
    it is not known: answers are not right or wrong, or never differed."""

    @property
    def told_apart(self) -> bool:
        """Whether the difference stands after the correction, at 5 %."""
        return self.p_holm < power.ALPHA


def compare(study: Study, rows: Sequence[Row]) -> list[Pair]:
    """All pairs of a study: by budget, each policy against full, then against those after it."""
    measure, cells = study.entry.measures[0], by_cell(rows)
    made = [
        _pair(measure, study.seed, cells, a, b, budget)
        for budget in study.budgets
        for a, b in _names(study, measure)
        if (a, budget) in cells and _key(b, budget) in cells
    ]
    corrected = stats.holm([pair.p for pair in made])
    return [replace(pair, p_holm=p) for pair, p in zip(made, corrected, strict=True)]


def note(study: Study, pairs: Sequence[Pair]) -> Power | None:
    """The power note, made for the pair whose gap has the median variance; None if none varied.

    Only of shares of right answers, in points: the note of other measures has no scale. Pairs that
    never differed are left out: their variance is not known to be nothing.
    """
    if not study.entry.measures[0].binary:
        return None
    varied = [pair for pair in pairs if pair.detectable > 0]
    if not varied:
        return None
    middle = median_low([pair.detectable for pair in varied])
    pair = next(pair for pair in varied if pair.detectable == middle)
    samples = max(1, round(pair.samples / pair.problems))
    return Power(
        problems=pair.problems,
        samples=samples,
        pair=(pair.a, pair.b, pair.budget),
        spread=pair.spread,
        detectable=pair.detectable,
        needed=power.needed(pair.spread, samples),
    )


def write_csv(path: Path, pairs: Sequence[Pair]) -> None:
    """pairs.csv, one line a pair; `detectable` is empty where it is not known."""
    columns = ("measure", "policy_a", "policy_b", "budget", "problems", "samples", "difference",
               "low", "high", "p", "p_holm", "detectable")  # fmt: skip
    lines: list[Sequence[object]] = [columns]
    for pair in pairs:
        head = (pair.measure, pair.a, pair.b, pair.budget, pair.problems, pair.samples)
        numbers = (*pair.difference, pair.p, pair.p_holm, pair.detectable)
        lines.append([*head, *("" if math.isnan(x) else f"{x:.6g}" for x in numbers)])
    files.write_csv(path, lines)


def _key(policy: str, budget: str) -> tuple[str, str]:
    return (policy, FULL if policy == FULL else budget)


def _names(study: Study, measure: Measure) -> Iterator[tuple[str, str]]:
    if measure.against_full:
        yield from ((policy, FULL) for policy in study.policies)
    for i, a in enumerate(study.policies):
        yield from ((a, b) for b in study.policies[i + 1 :])


def _pair(measure: Measure, seed: int, cells: Cells, a: str, b: str, budget: str) -> Pair:
    mine, theirs = cells[_key(a, budget)], cells[_key(b, budget)]
    above, reference, below = measure.paired(mine, theirs)
    samples = measure.sample_gaps(mine, theirs)
    count = sum(map(len, samples))
    spread = power.UNKNOWN
    if measure.binary and samples:
        shares = [[x / n for x, n in zip(sums, below, strict=True)] for sums in (above, reference)]
        spread = power.spread(samples, *shares)
    return Pair(
        measure=measure.key,
        a=a,
        b=b,
        budget=budget,
        problems=len(samples),
        samples=count,
        difference=stats.paired_difference(above, reference, below, most=measure.most),
        p=stats.sign_flip([x - y for x, y in zip(above, reference, strict=True)], seed),
        p_holm=math.nan,
        spread=spread,
        detectable=spread.detectable(len(samples), count / max(1, len(samples))),
    )
