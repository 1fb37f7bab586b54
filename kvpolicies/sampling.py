"""From logits to tokens: transformers' own processors, and randomness that belongs to a request."""

from dataclasses import dataclass
from typing import Any

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
        if not self.temperature >= 0:
            raise UserError(f"sampling: temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling: top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise UserError(f"sampling: top_k must be >= 0 (0 = off), got {self.top_k}")

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

    def generator(self, request: int) -> torch.Generator:
        """A request's own random numbers: the same in any batch, at any time."""
        return torch.Generator().manual_seed((self.seed << 32) + request)


def choose(
    logits: Tensor, chain: LogitsProcessorList, greedy: bool, randoms: list[torch.Generator]
) -> list[int]:
    """One token a row.

    Args:
        logits: [A, V] float32.
        randoms: each row's generator; one number is drawn from each unless `greedy`.
    """
    if greedy:
        return logits.argmax(dim=-1).tolist()
    history: Any = torch.empty(logits.shape[0], 0, dtype=torch.long)  # none of ours reads it
    mass = chain(history, logits).double().softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.cat([torch.rand(1, dtype=torch.float64, generator=r) for r in randoms])
    target = drawn.to(mass.device)[:, None] * mass[:, -1:]
    # right=True: a number equal to a cumulative mass belongs to the next token with any mass.
    return torch.searchsorted(mass, target, right=True)[:, 0].tolist()
