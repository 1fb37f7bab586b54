"""Quotas of segments around another reference's scores (AMS, arXiv 2605.23200)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tests.reference.attention import Array, average_pool, causal_rows
from tests.reference.policies import Batched
from tests.reference.rivals import Choosing
from tests.reference.rule import Budget, Observation, State, Stream, Terms


@dataclass(frozen=True)
class MassQuota(Batched):
    """Shares the top-k of `base` out among segments."""

    base: Batched = field(default_factory=Batched)
    observe_window: int = 32
    step: float = 0.02
    shortest: int = 32
    longest: int = 1024
    least: int = 8
    one_set: bool = False

    def wish(self, total: int) -> int:
        return self.base.wish(total)

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        return self.base.terms(asked, prompt, limit)

    def protected_newest(self, budget: Budget) -> int:
        return self.base.protected_newest(budget)

    def protection(self, budget: Budget) -> tuple[int, int]:
        return self.base.protection(budget)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _MassQuota(self, stream, budget)


def cut(mass: list[float], step: float, shortest: int, longest: int) -> list[range]:
    """Segments of tokens, as the authors cut them; `mass` sums to one."""
    targets = [step * i for i in range(1, math.ceil(1 / step))]
    total, marks = 0.0, {0, len(mass)}
    for i, m in enumerate(mass):
        before, total = total, total + m
        if any(before < target <= total for target in targets):
            marks.add(min(max(i, 1), len(mass) - 1))
    ordered = sorted(marks)
    pieces = []
    for a, b in pairwise(ordered):
        pieces += [range(x, min(x + longest, b)) for x in range(a, b, longest)]
    joined: list[range] = []
    for piece in pieces:
        if joined and len(joined[-1]) < shortest:
            joined[-1] = range(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


class _MassQuota(Choosing):
    policy: MassQuota

    def __init__(self, policy: MassQuota, stream: Stream, budget: Budget):
        super().__init__(policy, stream, budget)
        self.inner = policy.base.start(stream, budget)
        self.credit = np.zeros((stream.heads, stream.tokens))

    def observe(self, event: Observation) -> None:
        self.inner.observe(event)

    def about_to_drop(self, n: int) -> None:
        super().about_to_drop(n)
        self.inner.about_to_drop(n)

    def evicted(self, kept: list[Array], position: int) -> None:
        self.inner.evicted(kept, position)

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        found = self.inner.scores(cached, position)
        self.gap = min(self.gap, self.inner.gap)
        both = enumerate(zip(found, cached, strict=True))
        return [self._of(h, own, kept, position) for h, (own, kept) in both]

    def _of(self, h: int, own: Array, kept: Array, position: int) -> Array:
        policy, among = self.policy, self.contested(kept, position)
        mass = self._mass(h, kept, among, position)
        order = [j for j in np.argsort(kept) if among[j]]
        shares = [float(mass[j]) for j in order]
        sums = np.cumsum(shares)
        near = np.abs(sums[:-1, None] - policy.step * np.arange(1, math.ceil(1 / policy.step)))
        if near.size:
            self.gap = min(self.gap, float(near.min()) / policy.step)
        scores = np.full(len(kept), np.inf)
        heaps = []
        for segment in cut(shares, policy.step, policy.shortest, policy.longest):
            members = [order[i] for i in segment]
            members.sort(key=lambda j: (own[j], kept[j]), reverse=True)
            heaps.append((sum(shares[i] for i in segment), members))
        for weight, members in heaps:
            for rank, j in enumerate(members):
                seat = rank - policy.least + 0.5
                scores[j] = policy.least - rank if rank < policy.least else -seat / weight
            for one, other in pairwise(members):
                if own[one] != own[other]:
                    self._close(float(own[one]), float(own[other]))
        return scores

    def _close(self, more: float, less: float) -> None:
        if np.isfinite(more) and np.isfinite(less):
            # Small weights carry the rounding of large logits.
            self.gap = min(self.gap, abs(more - less) / max(abs(more), abs(less)) / 100)

    def _mass(self, h: int, kept: Array, among: Array, position: int) -> Array:
        heads = range(self.stream.heads) if self.policy.one_set else [h]
        now = np.mean([self._attention(i, kept, among, position) for i in heads], axis=0)
        now = shares_of(now, among)
        self.credit[h, kept] = 0.8 * self.credit[h, kept] + 0.2 * now
        credit = shares_of(self.credit[h, kept], among)
        return shares_of(0.7 * now + 0.3 * credit, among)

    def _attention(self, h: int, kept: Array, among: Array, position: int) -> Array:
        taus = self.stream.newest(position, self.policy.observe_window)
        rows = causal_rows(self.stream.q[h][:, taus], taus, self.stream.k[h, kept], kept)
        pools = [average_pool(row.mean(axis=0) * among, kept, 5) for row in rows]
        return np.mean(pools, axis=0)


def shares_of(x: Array, among: Array) -> Array:
    part = (x + 1e-12) * among
    return part / part.sum()
