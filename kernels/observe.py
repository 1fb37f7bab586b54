"""Observation scores: how much each cached key is attended by a few observation queries."""

import torch
from torch import Tensor

from kvpolicies.kernels.softmax import Softmax


def observation_weights(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    softmax: Softmax | float,
    valid: Tensor | None = None,
) -> Tensor:
    """Softmax of each observation query over the cached keys it may see.

    Args:
        queries: [B, H, G, N, D], already rotated to their positions.
        keys: [B, H, L, D], all slots filled.
        query_positions: [B, N] integer; a query does not see keys at later positions.
        key_positions: [B, H, L] integer.
        softmax: the model's; a float is its scale alone.
        valid: [B, N] bool; queries that do not exist weigh nothing anywhere.

    Returns:
        [B, H, G, N, L] float32; rows of invalid queries, and of queries that see no key, are zero.
    """
    b, h, g, n, d = queries.shape
    packed = queries.float().reshape(b, h, g * n, d)
    if not isinstance(softmax, Softmax):
        softmax = Softmax(softmax)
    products = (packed @ keys.float().transpose(-1, -2)).view(b, h, g, n, -1)
    visible = key_positions[:, :, None, None, :] <= query_positions[:, None, None, :, None]
    if valid is not None:
        visible = visible & valid[:, None, None, :, None]
    # A finite floor, not -inf: a query that sees nothing gives zeros, while a NaN in queries or
    # keys still reaches the caller, who refuses it.
    logits = softmax.logits(products).masked_fill(~visible, torch.finfo(torch.float32).min)
    return softmax.weights(logits) * visible
