"""Policies whose newest queries decide, and the oracle, whose future queries do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.attention import Array, causal_rows, logits
from tests.reference.policies import Batched
from tests.reference.rule import Budget, State, Stream, Terms, of_prompt
from tests.reference.scores import rkv_scores, rkv_threshold_gap, rpc_scores, snapkv_scores


@dataclass(frozen=True)
class SnapKV(Batched):
    """SnapKV, decode form, observed by the newest `observe_window` queries.

    `faithful`: the prompt is compressed once, when it is complete; every new token stays.
    """

    every: int = 128
    observe_window: int = 32
    kernel: int = 5
    faithful: bool = False

    def protected_newest(self, budget: Budget) -> int:
        return self.observe_window

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        if asked.total <= self.observe_window:
            raise ValueError("the observing tokens alone fill the budget")
        return of_prompt(asked, prompt, limit, window=self.observe_window)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _SnapKV(self, stream)


class _SnapKV(State):
    def __init__(self, policy: SnapKV, stream: Stream):
        super().__init__(stream)
        self.policy = policy

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        taus = self.stream.newest(position, self.policy.observe_window)
        kernel = self.policy.kernel
        return [
            snapkv_scores(self.stream.k[h, kept], kept, self.stream.q[h][:, taus], taus, kernel)
            for h, kept in enumerate(cached)
        ]


@dataclass(frozen=True)
class RPC(Batched):
    """RPC under a fixed budget: one kept set per layer.

    `faithful`: the prompt stays, and whenever there are `P` generated tokens more than the
    observing ones, they are compressed to P / c, so that the cache grows by so much; the budget
    asked for does not matter.
    """

    every: int = 128
    observe_window: int = 32
    kernel: int = 7
    faithful: bool = False
    P: int = 1024
    c: int = 4

    def protected_newest(self, budget: Budget) -> int:
        return self.observe_window

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        grows, observing = self.P // self.c, self.observe_window
        most = prompt + -(-limit // self.P) * grows + self.P + observing

        def full_at(seen: int) -> int:
            periods = -(-max(0, seen - prompt - observing) // self.P)
            return prompt + max(0, periods - 1) * grows + self.P + observing

        return Terms(Budget(most, prompt, self.observe_window), full_at, self.P - grows)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _RPC(self, stream, budget.sinks)


class _RPC(State):
    def __init__(self, policy: RPC, stream: Stream, first: int):
        super().__init__(stream)
        self.policy, self.first = policy, first

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        taus = self.stream.newest(position, self.policy.observe_window)
        keys = np.array([self.stream.k[h, kept] for h, kept in enumerate(cached)])
        queries = self.stream.q[:, :, taus]
        where = (self.policy.kernel, self.first)
        return [rpc_scores(keys, cached[0], queries, taus, *where)] * len(cached)


@dataclass(frozen=True)
class RKV(Batched):
    """R-KV: importance by the newest `alpha` queries against redundancy.

    `faithful`: the cache holds the budget and a buffer of `every` tokens, and is emptied down to
    the budget.
    """

    every: int = 128
    alpha: int = 8
    mix: float = 0.1
    beta: int = 1
    threshold: float = 0.5
    kernel: int = 7
    faithful: bool = False

    def protected_newest(self, budget: Budget) -> int:
        return self.alpha

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        if asked.total <= self.alpha:
            raise ValueError("the observing tokens alone fill the budget")
        return Terms(Budget(asked.total + self.every, 0, self.alpha), drop=self.every)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _RKV(self, stream)


class _RKV(State):
    def __init__(self, policy: RKV, stream: Stream):
        super().__init__(stream)
        self.policy = policy

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        policy = self.policy
        taus = self.stream.newest(position, policy.alpha)
        scores = []
        for h, kept in enumerate(cached):
            keys, queries = self.stream.k[h, kept], self.stream.q[h][:, taus]
            options = (policy.mix, policy.beta, policy.threshold, policy.kernel)
            scores.append(rkv_scores(keys, kept, queries, taus, *options))
            self.gap = min(self.gap, rkv_threshold_gap(keys, policy.threshold))
        return scores


@dataclass(frozen=True)
class Oracle(Batched):
    """Attention that a full cache's run will still give a token: the lookahead."""

    every: int = 32

    def start(self, stream: Stream, budget: Budget) -> State:
        return _Oracle(stream)


class _Oracle(State):
    """weights[h] [G, T, T]: the full cache's attention, row = query, causal."""

    def __init__(self, stream: Stream):
        super().__init__(stream)
        every = np.arange(stream.tokens)
        self.weights = [
            causal_rows(stream.q[h], every, stream.k[h], every) for h in range(stream.heads)
        ]

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        return [
            self.weights[h][:, position + 1 :, kept].sum(axis=1).max(axis=0)
            for h, kept in enumerate(cached)
        ]


def log_sum_exps(stream: Stream) -> Array:
    """Of each query's logits over all keys up to its own, nothing evicted -> [H, G, T]."""
    every = np.arange(stream.tokens)
    seen = every[None, :] <= every[:, None]
    rows = [np.where(seen, logits(q, k), -np.inf) for q, k in zip(stream.q, stream.k, strict=True)]
    return np.logaddexp.reduce(rows, axis=-1)
