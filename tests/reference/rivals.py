"""Rivals that came later: raas, gkv, dropkv, longflow, criticalkv."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.attention import Array, average_pool, causal_rows
from tests.reference.policies import Batched
from tests.reference.rule import Budget, Observation, State, Stream, Terms, of_prompt
from tests.reference.scores import rkv_redundancy, rkv_threshold_gap


@dataclass(frozen=True)
class RaaS(Batched):
    """The last step at which a token was looked at. `faithful`: the prompt stays."""

    alpha: float = 1e-4
    top: float = 0.0
    faithful: bool = False

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        if prompt >= asked.total:
            raise ValueError("the prompt fills the budget")
        return Terms(Budget(asked.total, prompt, 0))

    def start(self, stream: Stream, budget: Budget) -> State:
        return _RaaS(self, stream)


class _RaaS(State):
    """The gap is that of an attention to what decides: alpha, or the next rank."""

    def __init__(self, policy: RaaS, stream: Stream):
        super().__init__(stream)
        self.policy = policy
        self.stamps = np.tile(np.arange(stream.tokens), (stream.heads, 1))

    def observe(self, event: Observation) -> None:
        taus = np.arange(event.first, event.first + event.n)
        for h, kept in enumerate(event.cached):
            rows = causal_rows(self.stream.q[h][:, taus], taus, self.stream.k[h, kept], kept)
            for tau, attention in zip(taus, rows.max(axis=0), strict=True):
                seen = kept <= tau
                self._query(h, kept[seen], attention[seen], int(tau))

    def _query(self, h: int, kept: Array, attention: Array, tau: int) -> None:
        line, n = self.policy.alpha, int(self.policy.top * len(kept))
        if self.policy.top:
            ranked = np.append(np.sort(attention)[::-1], 0.0)
            line = (ranked[n - 1] + ranked[n]) / 2 if n else np.inf
        if np.isfinite(line):
            self.gap = min(self.gap, float(np.abs(attention - line).min() / line))
        self.stamps[h, kept[attention > line]] = tau

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        return [self.stamps[h, kept].astype(float) for h, kept in enumerate(cached)]


@dataclass(frozen=True)
class GKV(Batched):
    """Importance that decays by `decay` an eviction, against R-KV's redundancy."""

    every: int = 128
    observe_window: int = 16
    decay: float = 0.8
    mix: float = 0.5
    faithful: bool = False

    def protected_newest(self, budget: Budget) -> int:
        return self.observe_window

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        window = self.observe_window
        return Terms(Budget(asked.total + self.every, 0, window), drop=self.every)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _GKV(self, stream)


class _GKV(State):
    def __init__(self, policy: GKV, stream: Stream):
        super().__init__(stream)
        self.policy = policy
        self.importance = np.zeros((stream.heads, stream.tokens))

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        policy = self.policy
        taus = self.stream.newest(position, policy.observe_window)
        scores = []
        for h, kept in enumerate(cached):
            keys, older = self.stream.k[h, kept], kept < taus[0]
            rows = causal_rows(self.stream.q[h][:, taus], taus, keys, kept)
            now = rows.max(axis=0).mean(axis=0)
            redundancy = rkv_redundancy(keys, kept)
            if older.any():
                now, redundancy = now / now[older].max(), redundancy / redundancy[older].max()
            else:
                redundancy = redundancy / 1e-38
            past = policy.decay * self.importance[h, kept]
            self.importance[h, kept] = np.where(older, np.maximum(now, past), 0.0)
            self.gap = min(self.gap, rkv_threshold_gap(keys))
            mixed = policy.mix * self.importance[h, kept] - (1 - policy.mix) * redundancy
            scores.append(mixed)
        return scores


@dataclass(frozen=True)
class DropKV(Batched):
    """How far outputs move without a token."""

    every: int = 128
    observe_window: int = 32
    faithful: bool = False

    def protected_newest(self, budget: Budget) -> int:
        return self.observe_window

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        window = self.observe_window
        return of_prompt(asked, prompt, limit, window=window) if self.faithful else Terms(asked)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _DropKV(self, stream)


class _DropKV(State):
    def __init__(self, policy: DropKV, stream: Stream):
        super().__init__(stream)
        self.policy = policy

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        taus = self.stream.newest(position, self.policy.observe_window)
        scores = []
        for h, kept in enumerate(cached):
            values = self.stream.v[h, kept]
            rows = causal_rows(self.stream.q[h][:, taus], taus, self.stream.k[h, kept], kept)
            moved = np.zeros(len(kept))
            for weights in rows.reshape(-1, len(kept)):
                for j, p in enumerate(weights):
                    others = np.delete(np.arange(len(kept)), j)
                    if p > 1 - 1e-6 or len(kept) == 1:
                        gone = (p / 1e-6) * (weights @ values - values[j])
                    else:
                        gone = weights[others] @ values[others] / (1 - p) - weights @ values
                    moved[j] += gone @ gone
            scores.append(moved)
        return scores


@dataclass(frozen=True)
class LongFlow(Batched):
    """Part in the newest output, one set a layer; `faithful`: nothing is protected."""

    faithful: bool = False

    def protection(self, budget: Budget) -> tuple[int, int]:
        return (0, 0) if self.faithful else super().protection(budget)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _LongFlow(stream)


class _LongFlow(State):
    def scores(self, cached: list[Array], position: int) -> list[Array]:
        total, now = np.zeros(len(cached[0])), np.array([position])
        for h, kept in enumerate(cached):
            for q in self.stream.q[h]:
                row = causal_rows(q[None, now], now, self.stream.k[h, kept], kept)[0, 0]
                total += np.abs(row[:, None] * self.stream.v[h, kept]).sum(axis=-1)
        return [total] * len(cached)


@dataclass(frozen=True)
class CriticalKV(Batched):
    """Half by attention, the rest by attention times the value's part in the output."""

    every: int = 128
    observe_window: int = 32
    kernel: int = 5
    epsilon: float = 1e-4
    defensive: bool = False
    faithful: bool = False

    def protected_newest(self, budget: Budget) -> int:
        return self.observe_window

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        window = self.observe_window
        return of_prompt(asked, prompt, limit, window=window) if self.faithful else Terms(asked)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _CriticalKV(self, stream, budget)


class Choosing(State):
    """One whose scores depend on how many slots they fill."""

    def __init__(self, policy: Batched, stream: Stream, budget: Budget):
        super().__init__(stream)
        self.policy, self.budget, self.n_drop = policy, budget, 0

    def about_to_drop(self, n: int) -> None:
        self.n_drop = n

    def contested(self, kept: Array, position: int) -> Array:
        """Which of the cached positions [L] this eviction may free."""
        sinks, window = self.policy.protection(self.budget)
        wish = self.policy.protected_newest(self.budget)
        window = min(
            max(window, min(wish, self.budget.total - sinks - self.n_drop)),
            len(kept) - sinks - self.n_drop,
        )
        return (kept >= sinks) & (kept <= position - max(0, window))


class _CriticalKV(Choosing):
    policy: CriticalKV

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        policy, stream = self.policy, self.stream
        taus = stream.newest(position, policy.observe_window)
        scores = []
        for h, kept in enumerate(cached):
            older = kept < taus[0]
            rows = causal_rows(stream.q[h][:, taus], taus, stream.k[h, kept], kept) * older
            base = np.zeros(len(kept))
            if older.any():
                base[older] = (self._worst if policy.defensive else self._mean)(
                    rows[..., older], kept[older]
                )
            parts = [np.abs(stream.v[h, kept] @ w).sum(axis=-1) for w in stream.output[h]]
            both = (base + policy.epsilon) * np.mean(parts, axis=0)
            may_go = self.contested(kept, position)
            stays = int(may_go.sum()) - self.n_drop
            half = stays // 2
            if policy.faithful:
                half = max(0, (len(kept) - self.n_drop) // 2 - policy.observe_window)
            ranked = [j for j in np.lexsort((kept, base))[::-1] if may_go[j]]
            if 0 < half < len(ranked):
                self._close(float(base[ranked[half - 1]]), float(base[ranked[half]]))
            both[ranked[:half]] = np.inf
            both[~older] = np.inf
            scores.append(both)
        return scores

    def _close(self, more: float, less: float) -> None:
        if more > less:
            self.gap = min(self.gap, (more - less) / more)

    def _mean(self, rows: Array, positions: Array) -> Array:
        means = rows.mean(axis=1)
        return np.mean([average_pool(m, positions, self.policy.kernel) for m in means], axis=0)

    def _worst(self, rows: Array, positions: Array) -> Array:
        each = rows.reshape(-1, len(positions))
        worst = np.max([average_pool(r, positions, self.policy.kernel) for r in each], axis=0)
        return np.maximum(worst, worst.mean())
