"""The soft pool: from the attention of many observation queries to one score a key."""

import torch
from torch import Tensor


def soft(weights: Tensor, looking: Tensor, temperature: float) -> Tensor:
    """mean(W^(1/t))^t: the mean at temperature t = 1, towards the maximum as t falls to zero.

    The log-mean-exp of log W, with temperature. The maximum is taken out first, so that small
    weights to a large power do not vanish.

    Args:
        weights: [B, H, G, N, L].
        looking: [B, 1, 1] queries that look, at least one; where nobody looks all weights are zero.
        temperature: above 0.

    Returns:
        [B, H, L].
    """
    top = weights.amax(dim=(2, 3)).clamp_min(torch.finfo(weights.dtype).tiny)
    shares = (weights / top[:, :, None, None]) ** (1 / temperature)
    return top * (shares.sum(dim=(2, 3)) / looking) ** temperature
