"""TriAttention as its paper writes it: amplitudes, phases and lengths of pairs, by frequency."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from safetensors.numpy import load_file

from tests.reference.attention import Array
from tests.reference.policies import Batched
from tests.reference.rivals import Choosing
from tests.reference.rule import Budget, State, Stream, Terms


@dataclass(frozen=True)
class TriAttention(Batched):
    """`faithful`: the prompt stays, no window, and a buffer of `every` tokens."""

    statistics: str = ""
    every: int = 128
    ahead: int = 65536
    standardise: bool = True
    faithful: bool = False

    def protected_newest(self, budget: Budget) -> int:
        return 0

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        if not self.faithful:
            return Terms(asked)
        return Terms(Budget(asked.total + self.every, prompt, 0), drop=self.every)

    def start(self, stream: Stream, budget: Budget) -> State:
        return _TriAttention(self, stream, budget)


def pairs(x: Array) -> Array:
    """[..., D] as D/2 complex numbers."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def drawn(stream: Stream) -> dict[str, Array]:
    """Statistics where no file has any."""
    rng = np.random.default_rng(7)
    mean = rng.standard_normal((stream.heads, stream.group, stream.k.shape[-1]))
    return {"0.mean": mean, "0.size": np.abs(pairs(mean)) + 0.3}


class _TriAttention(Choosing):
    policy: TriAttention

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        policy, stream = self.policy, self.stream
        found = load_file(policy.statistics) if policy.statistics else drawn(stream)
        dim = stream.k.shape[-1]
        omega = 10000.0 ** (-2.0 * np.arange(dim // 2) / dim)
        offsets = 2.0 ** np.arange(policy.ahead.bit_length())
        scores = []
        for h, kept in enumerate(cached):
            raw = np.stack([stream.rope(stream.k[h, p], -int(p)) for p in kept])
            k, among = pairs(raw), self.contested(kept, position)
            heads = []
            for mean, size in zip(found["0.mean"][h], found["0.size"][h], strict=True):
                mu = pairs(mean.astype(float))
                phase = np.angle(mu * k.conj())
                apart = position + 1 - kept[:, None] + offsets
                waves = np.cos(apart[:, :, None] * omega + phase[:, None])
                trig = (np.abs(mu) * np.abs(k))[:, None] * waves
                rest = (size - np.abs(mu)) * np.abs(k)
                score = trig.sum(axis=-1).mean(axis=-1) + rest.sum(axis=-1)
                if policy.standardise:
                    score = (score - score[among].mean()) / max(score[among].std(), 1e-6)
                heads.append(score)
            scores.append(np.max(heads, axis=0))
        return scores
