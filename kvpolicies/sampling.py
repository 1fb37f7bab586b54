"""From logits to tokens: transformers' own processors, and randomness that belongs to a request."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvpolicies.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; `top_p` and `top_k` (0 = off) cut the distribution's tail."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"sampling: temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling: top_p must lie in (0, 1], got {self.top_p}")
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"sampling: {name} must be >= 0, got {getattr(self, name)}")

    def processors(self) -> LogitsProcessorList:
        """The logits processors, in transformers' own order; empty when greedy."""
        chain = LogitsProcessorList()
        if self.temperature not in (0.0, 1.0):
            chain.append(TemperatureLogitsWarper(self.temperature))
        if self.temperature and self.top_k:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.temperature and self.top_p < 1:
            chain.append(TopPLogitsWarper(self.top_p))
        return chain

    def generator(self, request: int) -> np.random.Generator:
        """A request's own random numbers: the same in any batch, at any time."""
        # numpy mixes both numbers in; torch's CPU generator would drop the seed's upper half.
        return np.random.default_rng([self.seed, request])


def choose(
    logits: Tensor, chain: LogitsProcessorList, greedy: bool, randoms: list[np.random.Generator]
) -> Tensor:
    """One token a row, [A] int64 on the logits' device, which is not waited for.

    Args:
        logits: [A, V] float32.
        randoms: each row's generator; one number is drawn from each unless `greedy`.
    """
    if greedy:
        return logits.argmax(dim=-1)
    history: Any = torch.empty(logits.shape[0], 0, dtype=torch.long)  # none of ours reads it
    mass = chain(history, logits).double().softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.tensor([r.random() for r in randoms], dtype=torch.float64)
    if mass.is_cuda:
        drawn = drawn.pin_memory().to(mass.device, non_blocking=True)
    # right=True: a number equal to a cumulative mass belongs to the next token with any mass.
    return torch.searchsorted(mass, drawn[:, None] * mass[:, -1:], right=True)[:, 0]
