"""The rule by which `kvpolicies select` chooses, and when it refuses to.

With an accuracy constraint (`least_accuracy`: a share of right samples; `largest_loss`: how much
less than full, paired by problem; both must hold if both are given):

    Among the candidates that fit into the memory and meet the constraint with confidence on every
    task, the worst one included, the one whose cache and state take the fewest bytes wins.
    Candidates within 1 % of these bytes are equals: the most accurate wins (mean over tasks), then
    the one of fewer bytes, then the first by name.

    With confidence: a lower bound (`bounds`) clears the threshold. The chance that any candidate
    passes that truly violates the constraint, and so that one is chosen, is at most 5 %: bounds
    are at level 5 % / K, K the candidates that fit the memory (Bonferroni; what fits is known
    before any answer is graded). Tasks need no correction, since a candidate must pass on all
    (intersection-union test, Berger 1982). full loses nothing against itself.

Without one, under memory alone:

    Among the candidates that fit, the most accurate wins (mean over tasks), then the one of fewer
    bytes, then the first by name. It must be sure that no other is better by more than
    `tolerance`: upper bounds of the others' paired differences to it, at level 5 % / (K - 1), so
    that a winner that truly falls short of the best by more is declared at most once in 20 studies
    (comparisons with the best: Hsu 1984).

The data cannot tell (`UNDECIDED`) when nothing is sure to meet the constraint but point estimates
do, or when another may be better than the winner by more than the tolerance. `NONE`: not even
point estimates meet it, or nothing fits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvpolicies.eval.select.benches import Bench
from kvpolicies.eval.select.candidates import Candidate, gaps
from kvpolicies.eval.select.evidence import Evidence
from kvpolicies.eval.select.power import Need, need
from kvpolicies.eval.stats import bounds
from kvpolicies.eval.study.config import Cell

CHOSEN, UNDECIDED, NONE = "chosen", "undecided", "none"
ERROR = 0.05
"""The chance of a wrong choice, over all candidates."""
EQUAL = 0.01
"""Bytes that differ by no more are equal."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Constraints:
    """What is asked for. Shares are 0 to 1; None = not asked."""

    memory: int | None = None
    """Most bytes that may be held."""
    least_accuracy: float | None = None
    """Least share of right samples."""
    largest_loss: float | None = None
    """Most that may be lost against full."""
    tolerance: float = 0.03
    """Under memory alone: by how much another may be better than the choice."""

    @property
    def on_accuracy(self) -> bool:
        """Whether accuracy is constrained, so that bytes decide."""
        return self.least_accuracy is not None or self.largest_loss is not None


@dataclass(frozen=True)
class BoundTest:
    """One candidate on one bench against one threshold."""

    bench: str
    kind: str
    """accuracy, or loss (a difference to full: a loss of 3 points is -0.03)."""
    estimate: float
    bound: float
    """What it is not below, with confidence, all candidates together."""
    threshold: float
    need: Need | None
    """What the bound lacks; None if nothing, or if the estimate fails."""

    @property
    def slack(self) -> float:
        """By how much the bound clears the threshold; negative if it does not."""
        return self.bound - self.threshold

    @property
    def passes(self) -> bool:
        return self.slack >= -_ROUNDING

    @property
    def plausible(self) -> bool:
        """Whether the point estimate passes."""
        return self.estimate - self.threshold >= -_ROUNDING


@dataclass(frozen=True)
class Rival:
    """A candidate that may be better than the winner by more than the tolerance."""

    candidate: Candidate
    upper: float
    """By how much it may be better, with confidence."""
    need: Need | None


@dataclass(frozen=True)
class Choice:
    """The verdict, and all that it rests on."""

    verdict: str
    """Whether one was chosen, the data cannot tell, or none meets the constraints."""
    winner: Candidate | None
    """If undecided, the best by point estimates."""
    limits: Constraints
    """What was asked for."""
    candidates: tuple[Candidate, ...]
    """All, full first."""
    tests: dict[Cell, tuple[BoundTest, ...]]
    """Of each candidate, on each task against each threshold."""
    level: float
    """Of each bound."""
    equals: tuple[Candidate, ...] = ()
    """Others that would do as well; the tie-break decided."""
    rivals: tuple[Rival, ...] = ()
    """Those that may be better than the winner by more than the tolerance."""

    def fits(self, candidate: Candidate) -> bool:
        """Whether its predicted memory is within the limit."""
        return self.limits.memory is None or candidate.memory.total <= self.limits.memory

    def passes(self, candidate: Candidate) -> bool:
        """Whether it meets the accuracy constraint with confidence on every task."""
        return all(test.passes for test in self.tests[candidate.cell])

    def plausible(self, candidate: Candidate) -> bool:
        """Whether its point estimates meet it."""
        return all(test.plausible for test in self.tests[candidate.cell])

    def slack(self, candidate: Candidate) -> float:
        """By how much its worst bound clears its threshold; infinite if nothing was asked."""
        return min((test.slack for test in self.tests[candidate.cell]), default=math.inf)

    @cached_property
    def admissible(self) -> tuple[Candidate, ...]:
        """Those that fit."""
        return tuple(c for c in self.candidates if self.fits(c))


def choose(evidence: Evidence, candidates: Sequence[Candidate], limits: Constraints) -> Choice:
    """Applies the rule above to candidates of `evidence`."""
    fit = [c for c in candidates if limits.memory is None or c.memory.total <= limits.memory]
    if limits.on_accuracy:
        return _cheapest(evidence, candidates, fit, limits)
    return _best(evidence, candidates, fit, limits)


def _cheapest(
    evidence: Evidence, candidates: Sequence[Candidate], fit: list[Candidate], limits: Constraints
) -> Choice:
    tested = [c for c in fit if limits.least_accuracy is not None or not c.is_full]
    level = ERROR / max(1, len(tested))
    tests: dict[Cell, list[BoundTest]] = {c.cell: [] for c in candidates}
    for bench in evidence.benches:
        for test_of in _tests(bench, candidates, limits, level, evidence.study.seed):
            for cell, test in test_of.items():
                tests[cell].append(test)
    fixed = {cell: tuple(found) for cell, found in tests.items()}
    blank = Choice(NONE, None, limits, tuple(candidates), fixed, level)
    for verdict, kept in ((CHOSEN, blank.passes), (UNDECIDED, blank.plausible)):
        if able := [c for c in fit if kept(c)]:
            least = min(c.held for c in able)
            tied = sorted(
                (c for c in able if c.held <= (1 + EQUAL) * least),
                key=lambda c: (-c.mean.accuracy.value, c.held, c.label),
            )
            return Choice(
                verdict, tied[0], limits, tuple(candidates), fixed, level, tuple(tied[1:])
            )
    return blank


def _tests(
    bench: Bench, candidates: Sequence[Candidate], limits: Constraints, level: float, seed: int
) -> list[dict[Cell, BoundTest]]:
    """For each constraint, every candidate's test on this bench."""
    found, full = [], bench.full.correct
    if limits.least_accuracy is not None:
        values = {c.cell: bench.cells[c.cell].correct for c in candidates}
        found.append(_against(bench, values, "accuracy", limits.least_accuracy, 0.0, level, seed))
    if limits.largest_loss is not None:
        rest = (c.cell for c in candidates if not c.is_full)
        values = {cell: bench.cells[cell].correct - full for cell in rest}
        found.append(_against(bench, values, "loss", -limits.largest_loss, -1.0, level, seed))
    return found


def _against(
    bench: Bench,
    values: dict[Cell, np.ndarray],
    kind: str,
    threshold: float,
    worst: float,
    level: float,
    seed: int,
) -> dict[Cell, BoundTest]:
    if not values:
        return {}
    columns = np.stack([x.mean(axis=1) for x in values.values()])
    low = bounds.lower(bounds.draw_means(columns, worst, level, seed), level)
    found = {}
    for (cell, x), bound in zip(values.items(), low.tolist(), strict=True):
        lacking = None if bound >= threshold - _ROUNDING else need([x], threshold, worst, level)
        found[cell] = BoundTest(bench.label, kind, float(x.mean()), bound, threshold, lacking)
    return found


def _best(
    evidence: Evidence, candidates: Sequence[Candidate], fit: list[Candidate], limits: Constraints
) -> Choice:
    level = ERROR / max(1, len(fit) - 1)
    none: dict[Cell, tuple[BoundTest, ...]] = {c.cell: () for c in candidates}
    if not fit:
        return Choice(NONE, None, limits, tuple(candidates), none, level)
    ranked = sorted(fit, key=lambda c: (-c.mean.accuracy.value, c.held, c.label))
    winner, rest = ranked[0], ranked[1:]
    high = _better_by(evidence, winner, rest, level)
    rivals, equals = [], []
    for candidate, most in zip(rest, high, strict=True):
        if most > limits.tolerance + _ROUNDING:
            ahead = [
                b.cells[winner.cell].correct - b.cells[candidate.cell].correct
                for b in evidence.benches
            ]
            lacking = need(ahead, -limits.tolerance, -1.0, level)
            rivals.append(Rival(candidate, most, lacking))
        elif abs(candidate.held - winner.held) <= EQUAL * winner.held:
            equals.append(candidate)
    verdict = UNDECIDED if rivals else CHOSEN
    return Choice(
        verdict, winner, limits, tuple(candidates), none, level, tuple(equals), tuple(rivals)
    )


def _better_by(
    evidence: Evidence, winner: Candidate, rest: list[Candidate], level: float
) -> list[float]:
    """By how much each of `rest` may be better than the winner, in the mean over tasks."""
    if not rest:
        return []
    total: np.ndarray | float = 0.0
    for number, bench in enumerate(evidence.benches):
        columns = np.stack([gaps(bench, c.cell, winner.cell) for c in rest])
        seed = evidence.study.seed + number
        total = total + bounds.draw_means(columns, 1.0, level, seed)
    assert isinstance(total, np.ndarray)
    return bounds.upper(total / len(evidence.benches), level).tolist()
