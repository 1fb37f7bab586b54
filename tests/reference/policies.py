"""Policies that watch every step, or none, on top of the pure scores.

`every` and `protects` are the policy data of the eviction rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.attention import Array, causal_rows
from tests.reference.rule import (
    Budget,
    Observation,
    Policy,
    State,
    Stream,
    Terms,
    decode_drop,
)
from tests.reference.scores import (
    keydiff_scores,
    lazy_scores,
    lazy_update,
    streaming_scores,
    tova_scores,
)


@dataclass(frozen=True)
class Batched(Policy):
    """A policy that drops `every` tokens at a time (at most an eighth of the budget)."""

    every: int = 1
    protects: int = 0

    def wish(self, total: int) -> int:
        return min(self.every, total // 8)

    def protected_newest(self, budget: Budget) -> int:
        return self.protects


@dataclass(frozen=True)
class Streaming(Batched):
    """StreamingLLM: sinks and the newest."""

    def start(self, stream: Stream, budget: Budget) -> State:
        return _Streaming(stream)


class _Streaming(State):
    def scores(self, cached: list[Array], position: int) -> list[Array]:
        return [streaming_scores(positions) for positions in cached]


@dataclass(frozen=True)
class Tova(Batched):
    """TOVA, one kept set per layer; `faithful`: neither sinks nor a window are protected."""

    faithful: bool = False

    def protection(self, budget: Budget) -> tuple[int, int]:
        return (0, 0) if self.faithful else super().protection(budget)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _Tova(stream)


class _Tova(State):
    def scores(self, cached: list[Array], position: int) -> list[Array]:
        keys = np.array([self.stream.k[h, kept] for h, kept in enumerate(cached)])
        return [tova_scores(keys, self.stream.q[:, :, position])] * len(cached)


@dataclass(frozen=True)
class H2O(Batched):
    """H2O: attention summed over all queries so far and over the group.

    `faithful`: half of the budget for the heavy hitters, half for the newest, no sinks.
    """

    faithful: bool = False

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        window = min(max(1, asked.total // 2), asked.total - 1)
        return Terms(Budget(asked.total, 0, window))

    def start(self, stream: Stream, budget: Budget) -> State:
        return H2OState(stream)


class H2OState(State):
    """mass [H, T]: what each cached token has received."""

    def __init__(self, stream: Stream):
        super().__init__(stream)
        self.mass = np.zeros((stream.heads, stream.tokens))

    def observe(self, event: Observation) -> None:
        taus = np.arange(event.first, event.first + event.n)
        for h, kept in enumerate(event.cached):
            rows = causal_rows(self.stream.q[h][:, taus], taus, self.stream.k[h, kept], kept)
            self.mass[h, kept] += rows.sum(axis=(0, 1))

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        return [self.mass[h, kept] for h, kept in enumerate(cached)]

    def evicted(self, kept: list[Array], position: int) -> None:
        for h, positions in enumerate(kept):
            gone = np.setdiff1d(np.arange(self.stream.tokens), positions)
            self.mass[h, gone] = 0.0


@dataclass(frozen=True)
class KeyDiff(Batched):
    """KeyDiff: keys far from the mean direction stay."""

    every: int = 128

    def start(self, stream: Stream, budget: Budget) -> State:
        return _KeyDiff(stream)


class _KeyDiff(State):
    def scores(self, cached: list[Array], position: int) -> list[Array]:
        return [keydiff_scores(self.stream.k[h, kept]) for h, kept in enumerate(cached)]


@dataclass(frozen=True)
class Lazy(Batched):
    """LazyEviction: tokens whose attention recurs stay; as many of the newest as go at once.

    `faithful`: the cache holds the budget and `every` tokens, and is emptied down to the budget.
    """

    every: int = 101
    alpha: float = 1e-4
    faithful: bool = False

    def protected_newest(self, budget: Budget) -> int:
        return 0 if self.faithful else decode_drop(self, budget)

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        if asked.total <= self.every:
            raise ValueError("the newest tokens alone fill the budget")
        return Terms(Budget(asked.total + self.every, 0, self.every), drop=self.every)

    def start(self, stream: Stream, budget: Budget) -> State:
        return LazyState(self, stream)


class LazyState(State):
    """TS and MRI, `last` and `longest` [H, T]. The gap is |attention - alpha| / alpha.

    The prompt's queries are not observed, and it begins as if attended with its last token.
    """

    def __init__(self, policy: Lazy, stream: Stream):
        super().__init__(stream)
        self.policy = policy
        first = np.maximum(np.arange(stream.tokens), stream.prompt) - 1
        self.last = np.tile(first, (stream.heads, 1))
        self.longest = np.zeros_like(self.last)

    def observe(self, event: Observation) -> None:
        taus = np.arange(max(event.first, self.stream.prompt), event.first + event.n)
        if not len(taus):
            return
        for h, kept in enumerate(event.cached):
            rows = causal_rows(self.stream.q[h][:, taus], taus, self.stream.k[h, kept], kept)
            for tau, attention in zip(taus, rows.max(axis=0), strict=True):
                seen = kept <= tau
                self._query(h, kept[seen], attention[seen], int(tau))

    def _query(self, h: int, kept: Array, attention: Array, tau: int) -> None:
        alpha = self.policy.alpha
        known = self.last[h, kept], self.longest[h, kept]
        self.last[h, kept], self.longest[h, kept] = lazy_update(attention, tau, *known, alpha)
        self.gap = min(self.gap, *(abs(attention - alpha) / alpha), np.inf)

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        last = np.minimum(self.last, position)  # Within the prompt nobody has looked yet.
        return [
            lazy_scores(position, last[h, kept], self.longest[h, kept])
            for h, kept in enumerate(cached)
        ]
