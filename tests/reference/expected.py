"""Expected attention (arXiv 2510.00636): what queries drawn from a normal would pay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.attention import Array, Rope, softmax
from tests.reference.policies import Batched
from tests.reference.rule import Budget, State, Stream, Terms, of_prompt


def unrotated(stream: Stream, h: int, g: int, positions: Array) -> Array:
    """Queries [N, D] of one head before RoPE, by turning the rotated ones back."""
    return np.array([stream.rope(stream.q[h, g, p], -int(p)) for p in positions])


def mean_rotation(rope: Rope, dim: int, first: int, n: int) -> Array:
    """The matrix [D, D] that rotates to the mean of positions first .. first + n - 1."""
    columns = np.eye(dim)
    turned = [rope(columns, position) for position in range(first, first + n)]
    return np.mean(turned, axis=0).T


def expected_share(keys: Array, seen: Array, raw: Array, turn: Array) -> Array:
    """The softmax [L] of one head's expected exponentials over keys [L, D] marked in seen [L].

    raw [N, D] are queries before RoPE, turn [D, D] the mean rotation to come.
    """
    dim = keys.shape[-1]
    mean = raw.mean(axis=0) if len(raw) else np.zeros(dim)
    spread = sum((np.outer(q - mean, q - mean) for q in raw), np.zeros((dim, dim)))
    spread = turn @ (spread / max(1, len(raw))) @ turn.T
    exponents = [k @ turn @ mean / np.sqrt(dim) + k @ spread @ k / (2 * dim) for k in keys]
    return softmax(np.array(exponents), seen)


@dataclass(frozen=True)
class Expected(Batched):
    """Mean share over the group, at least `epsilon`, times the norm of the value."""

    every: int = 128
    observe_window: int = 256
    ahead: int = 512
    epsilon: float = 0.02
    faithful: bool = False

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        return of_prompt(asked, prompt, limit, sinks=4) if self.faithful else Terms(asked)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _Expected(self, stream, budget.sinks)


class _Expected(State):
    def __init__(self, policy: Expected, stream: Stream, sinks: int):
        super().__init__(stream)
        self.policy, self.sinks = policy, sinks

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        policy, stream = self.policy, self.stream
        taus = stream.newest(position, policy.observe_window)
        taus = taus[taus >= 4]
        turn = mean_rotation(stream.rope, stream.k.shape[-1], position + 1, policy.ahead)
        scores = []
        for h, kept in enumerate(cached):
            shares = [
                expected_share(
                    stream.k[h, kept], kept >= self.sinks, unrotated(stream, h, g, taus), turn
                )
                for g in range(stream.group)
            ]
            norms = np.sqrt((stream.v[h, kept] ** 2).sum(axis=-1))
            scores.append((np.mean(shares, axis=0) + policy.epsilon) * norms)
        return scores
