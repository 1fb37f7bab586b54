"""The training-free policies but beacon and random, on top of the pure scores.

`every` and `protects` are the policy data of the eviction rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.attention import Array, causal_rows
from tests.reference.rule import Budget, Observation, Policy, State, Stream
from tests.reference.scores import (
    keydiff_scores,
    lazy_scores,
    lazy_update,
    rkv_scores,
    rkv_threshold_gap,
    rpc_scores,
    snapkv_scores,
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

    def protected_newest(self) -> int:
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
    """H2O: attention summed over all queries so far and over the group."""

    def start(self, stream: Stream, budget: Budget) -> State:
        return H2OState(stream)


class H2OState(State):
    """mass[h][position]: what a cached token has received."""

    def __init__(self, stream: Stream):
        super().__init__(stream)
        self.mass: list[dict[int, float]] = [{} for _ in range(stream.heads)]

    def observe(self, event: Observation) -> None:
        taus = np.arange(event.first, event.first + event.n)
        for h, kept in enumerate(event.cached):
            keys = self.stream.k[h, kept]
            for g in range(self.stream.group):
                rows = causal_rows(self.stream.q[h, g, taus], taus, keys, kept)
                for position, weight in zip(kept, rows.sum(axis=0), strict=True):
                    self.mass[h][position] = self.mass[h].get(position, 0.0) + float(weight)

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        return [np.array([self.mass[h][j] for j in kept]) for h, kept in enumerate(cached)]

    def evicted(self, kept: list[Array], position: int) -> None:
        for h, positions in enumerate(kept):
            self.mass[h] = {j: self.mass[h][j] for j in positions}


@dataclass(frozen=True)
class SnapKV(Batched):
    """SnapKV, decode form, observed by the newest `queries` queries."""

    every: int = 32
    queries: int = 32
    kernel: int = 5

    def start(self, stream: Stream, budget: Budget) -> State:
        return _SnapKV(self, stream)


class _SnapKV(State):
    def __init__(self, policy: SnapKV, stream: Stream):
        super().__init__(stream)
        self.policy = policy

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        taus = self.stream.newest(position, self.policy.queries)
        kernel = self.policy.kernel
        return [
            snapkv_scores(self.stream.k[h, kept], kept, self.stream.q[h][:, taus], taus, kernel)
            for h, kept in enumerate(cached)
        ]


@dataclass(frozen=True)
class RPC(Batched):
    """RPC under a fixed budget: one kept set per layer."""

    every: int = 32
    protects: int = 32
    queries: int = 32
    kernel: int = 7

    def start(self, stream: Stream, budget: Budget) -> State:
        return _RPC(self, stream)


class _RPC(State):
    def __init__(self, policy: RPC, stream: Stream):
        super().__init__(stream)
        self.policy = policy

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        taus = self.stream.newest(position, self.policy.queries)
        keys = np.array([self.stream.k[h, kept] for h, kept in enumerate(cached)])
        queries = self.stream.q[:, :, taus]
        return [rpc_scores(keys, cached[0], queries, taus, self.policy.kernel)] * len(cached)


@dataclass(frozen=True)
class RKV(Batched):
    """R-KV: importance by the newest `protects` (alpha) queries against redundancy."""

    every: int = 128
    protects: int = 8
    lam: float = 0.1
    beta: int = 1
    threshold: float = 0.5
    kernel: int = 7

    def start(self, stream: Stream, budget: Budget) -> State:
        return _RKV(self, stream)


class _RKV(State):
    def __init__(self, policy: RKV, stream: Stream):
        super().__init__(stream)
        self.policy = policy

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        policy = self.policy
        taus = self.stream.newest(position, policy.protects)
        scores = []
        for h, kept in enumerate(cached):
            keys, queries = self.stream.k[h, kept], self.stream.q[h][:, taus]
            options = (policy.lam, policy.beta, policy.threshold, policy.kernel)
            scores.append(rkv_scores(keys, kept, queries, taus, *options))
            self.gap = min(self.gap, rkv_threshold_gap(keys, policy.threshold))
        return scores


@dataclass(frozen=True)
class KeyDiff(Batched):
    """KeyDiff: keys far from the mean direction stay."""

    def start(self, stream: Stream, budget: Budget) -> State:
        return _KeyDiff(stream)


class _KeyDiff(State):
    def scores(self, cached: list[Array], position: int) -> list[Array]:
        return [keydiff_scores(self.stream.k[h, kept]) for h, kept in enumerate(cached)]


@dataclass(frozen=True)
class Lazy(Batched):
    """LazyEviction: tokens whose attention recurs stay."""

    every: int = 32
    alpha: float = 1e-4

    def start(self, stream: Stream, budget: Budget) -> State:
        return LazyState(self, stream)


class LazyState(State):
    """recurrence[h][position] = (TS, MRI). The gap is |attention - alpha| / alpha."""

    def __init__(self, policy: Lazy, stream: Stream):
        super().__init__(stream)
        self.policy = policy
        self.recurrence: list[dict[int, tuple[int, int]]] = [{} for _ in range(stream.heads)]

    def observe(self, event: Observation) -> None:
        for h, kept in enumerate(event.cached):
            for tau in range(event.first, event.first + event.n):
                self.recurrence[h][tau] = (tau, 0)
                self._query(h, kept, tau)

    def _query(self, h: int, kept: Array, tau: int) -> None:
        alpha, taus = self.policy.alpha, np.array([tau])
        queries = self.stream.q[h][:, taus]
        rows = [causal_rows(query, taus, self.stream.k[h, kept], kept)[0] for query in queries]
        for position, attention in zip(kept, np.max(rows, axis=0), strict=True):
            if position < tau:
                last, longest = self.recurrence[h][position]
                update = lazy_update(float(attention), tau, last, longest, alpha)
                self.recurrence[h][position] = update
                self.gap = min(self.gap, abs(float(attention) - alpha) / alpha)

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        scores = []
        for h, kept in enumerate(cached):
            pairs = np.array([self.recurrence[h][j] for j in kept])
            scores.append(lazy_scores(position, pairs[:, 0], pairs[:, 1]))
        return scores

    def evicted(self, kept: list[Array], position: int) -> None:
        for h, positions in enumerate(kept):
            self.recurrence[h] = {j: self.recurrence[h][j] for j in positions}
