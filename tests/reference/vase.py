"""VaSE (arXiv 2606.03928): ranges of values, and draws that belong to sequence, layer and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.attention import Array, attention_row, average_pool
from tests.reference.policies import Batched
from tests.reference.rivals import Choosing
from tests.reference.rule import Budget, State, Stream, Terms

WORD = 1 << 64


def mixed(x: int) -> int:
    """Murmur3's finaliser on one 64-bit word, but for shifts, which lose the upper half's top."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x % WORD ^ (x % WORD >> 33) & 0x7FFFFFFF) * factor % WORD
    return x ^ (x >> 33) & 0x7FFFFFFF


def uniform(x: int) -> float:
    """Between 0 and 1, of a hash's lowest 24 bits."""
    return ((x & 0xFFFFFF) + 0.5) / 2**24


def thirteen_bits(x: Array) -> Array:
    """x [L], not negative, rounded to 13 bits: what ranges are compared by, so that equal tokens of
    a first layer tie."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.floor(fraction * 2**13 + 0.5), exponent - 13)


@dataclass(frozen=True)
class VaSE(Batched):
    """Of sequence 0, layer 0. `faithful`: four sinks, and a buffer beside the budget."""

    every: int = 128
    form: str = "range"
    share: float = 0.5
    sample: bool = True
    observe_window: int = 64
    faithful: bool = False

    def protected_newest(self, budget: Budget) -> int:
        return self.observe_window

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        n = self.observe_window
        return Terms(Budget(asked.total + n, 4, n), drop=n)

    def start(self, stream: Stream, budget: Budget) -> State:
        return (_Range if self.form == "range" else _Projected)(self, stream, budget)


class _Range(Choosing):
    policy: VaSE

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        return [self._of_head(h, kept, position) for h, kept in enumerate(cached)]

    def _of_head(self, h: int, kept: Array, position: int) -> Array:
        size = thirteen_bits(np.ptp(self.stream.v[h, kept], axis=-1))
        may_go = self.contested(kept, position)
        n = int(self.policy.share * (may_go.sum() - self.n_drop))
        ranked = [j for j in np.lexsort((kept, size))[::-1] if may_go[j]]
        if 0 < n < len(ranked) and size[ranked[n - 1]] > size[ranked[n]]:
            self.gap = min(self.gap, size[ranked[n - 1]] - size[ranked[n]])
        scores = self._attention(h, kept, position)
        if self.policy.sample:
            now = mixed(mixed(mixed(0) + h) + position + 1)
            for j, p in enumerate(kept):
                noise = -np.log(-np.log(uniform(mixed(now + int(p)))))
                scores[j] = np.log(scores[j]) + noise if scores[j] > 0 else -np.inf
        scores[ranked[:n]] = np.inf
        return scores

    def _attention(self, h: int, kept: Array, position: int) -> Array:
        taus = self.stream.newest(position, self.policy.observe_window)
        older = kept < taus[0]
        mean = np.zeros(len(kept))
        for q in self.stream.q[h]:
            rows = attention_row(q[taus], self.stream.k[h, kept], older)
            mean += average_pool(rows.mean(axis=0), kept, 5) / self.stream.group
        return mean


class _Projected(Choosing):
    def scores(self, cached: list[Array], position: int) -> list[Array]:
        dim = self.stream.k.shape[-1]
        x = mixed(mixed(mixed(0) - 1) + position + 1)
        hashes = [uniform(mixed(x + i)) for i in range(2 * dim * 20)]
        pairs = zip(hashes[::2], hashes[1::2], strict=True)
        numbers = [np.sqrt(-2 * np.log(a)) * np.cos(2 * np.pi * b) for a, b in pairs]
        g = np.array(numbers).reshape(dim, 20) / np.sqrt(20)
        found = []
        for h, kept in enumerate(cached):
            k, v = self.stream.k[h, kept] @ g, self.stream.v[h, kept] @ g
            found.append((k**2).sum(axis=-1) * (v**2).sum(axis=-1))
        return found
