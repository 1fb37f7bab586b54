"""From logits to tokens: transformers' own processors, and randomness that belongs to a request.

torch and transformers are imported where tokens are chosen: a `Sampling` is also a part of files
and command lines, which are refused before seconds of imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicies.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import LogitsProcessorList

NONE = -1
"""No token: what is chosen where the largest logit is NaN or infinite."""
COLDEST = 1e-3
"""Least temperature above 0: logits divided by less could leave the range of float32."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    Raises:
        UserError: for a value out of its range.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability; above 0, at most 1."""
    top_k: int = 0
    """Only so many likeliest tokens; 0 = off."""
    seed: int = 0
    """Of a request's own random numbers, with its number; 0 or more."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"sampling: temperature must be >= 0, got {self.temperature}")
        if 0 < self.temperature < COLDEST:
            raise UserError(
                f"sampling: temperature must be 0 (greedy) or at least {COLDEST}, "
                f"got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling: top_p must lie in (0, 1], got {self.top_p}")
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"sampling: {name} must be >= 0, got {getattr(self, name)}")

    def processors(self) -> LogitsProcessorList:
        """The logits processors, in transformers' own order; empty when greedy."""
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        chain = LogitsProcessorList()
        if self.temperature not in (0.0, 1.0):
            chain.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.temperature and self.top_k:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.temperature and self.top_p < 1:
            chain.append(TopPLogitsWarper(float(self.top_p)))
        return chain

    @property
    def chain_key(self) -> tuple[float, ...]:
        """Equal for rows that the same processors serve."""
        return (self.temperature, self.top_p, self.top_k) if self.temperature else ()

    def generator(self, request: int) -> np.random.Generator:
        """A request's own random numbers: the same in any batch, at any time."""
        import numpy as np

        # numpy mixes both numbers in; torch's CPU generator would drop the seed's upper half.
        return np.random.default_rng([self.seed, request])


def choose(
    logits: Tensor, chain: LogitsProcessorList, greedy: bool, randoms: list[np.random.Generator]
) -> Tensor:
    """One token a row, [A] int64 on the logits' device, which is not waited for; perhaps NONE.

    Args:
        logits: [A, V] float32.
        randoms: each row's generator; one number is drawn from each unless `greedy`.
    """
    import torch

    finite = logits.amax(dim=-1).isfinite()  # NaN anywhere is the largest
    if greedy:
        return logits.argmax(dim=-1).masked_fill(~finite, NONE)
    history: Any = torch.empty(logits.shape[0], 0, dtype=torch.long)  # none of ours reads it
    mass = chain(history, logits).double().softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.tensor([r.random() for r in randoms], dtype=torch.float64)
    if mass.is_cuda:
        drawn = drawn.pin_memory().to(mass.device, non_blocking=True)
    # right=True: a number equal to a cumulative mass belongs to the next token with any mass.
    found = torch.searchsorted(mass, drawn[:, None] * mass[:, -1:], right=True)[:, 0]
    found = found.clamp(max=logits.shape[1] - 1)  # a product may round up to the whole mass
    return found.masked_fill(~finite, NONE)


def choose_each(
    logits: Tensor, samplings: Sequence[Sampling], randoms: Sequence[np.random.Generator]
) -> Tensor:
    """Chooses tokens where each row has a sampling of its own: one `choose` a kind of sampling.

    Args:
        logits: [A, V] float32. samplings, randoms: each row's.
    """
    import torch

    from kvpolicies.transfer import on_device

    kinds: dict[tuple[float, ...], list[int]] = {}
    for row, sampling in enumerate(samplings):
        kinds.setdefault(sampling.chain_key, []).append(row)
    parts = []
    for key, rows in kinds.items():
        own = logits if len(kinds) == 1 else logits[on_device(rows, logits.device)]
        chain, drawn = samplings[rows[0]].processors(), [randoms[row] for row in rows]
        parts.append(choose(own, chain, not key, drawn))
    if len(parts) == 1:
        return parts[0]
    order = [row for rows in kinds.values() for row in rows]
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(parts)[on_device(places, logits.device)]
