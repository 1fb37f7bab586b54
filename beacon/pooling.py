"""From the attention of many observation queries to one score a key.

Each takes weights [B, H, G, N, L], the number of queries that look [B, 1, 1], at least one (where
nobody looks all weights are zero), and the temperature; and gives [B, H, L].
"""

from collections.abc import Callable

import torch
from torch import Tensor


def largest(weights: Tensor, looking: Tensor, temperature: float) -> Tensor:
    """The maximum over group and queries: one query's need is enough."""
    return weights.amax(dim=(2, 3))


def mean(weights: Tensor, looking: Tensor, temperature: float) -> Tensor:
    """The mean over group and queries."""
    return weights.sum(dim=(2, 3)) / looking


def soft(weights: Tensor, looking: Tensor, temperature: float) -> Tensor:
    """mean(W^(1/t))^t: the mean at temperature t = 1, towards the maximum as t falls to zero.

    The log-mean-exp of log W, with temperature. The maximum is taken out first, so that small
    weights to a large power do not vanish.
    """
    top = weights.amax(dim=(2, 3)).clamp_min(torch.finfo(weights.dtype).tiny)
    shares = (weights / top[:, :, None, None]) ** (1 / temperature)
    return top * mean(shares, looking, temperature) ** temperature


POOLS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "max": largest,
    "mean": mean,
    "soft": soft,
}
