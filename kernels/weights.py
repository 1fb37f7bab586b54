"""Softmax of observation queries over the cached keys, in whole: what observe.py pools."""

from dataclasses import replace

import torch
from torch import Tensor

from kvpolicies.kernels.logit_transform import LogitTransform


def observation_weights(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    softmax: LogitTransform | float,
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
    if not isinstance(softmax, LogitTransform):
        softmax = LogitTransform(softmax)
    return weights_of(queries, keys, query_positions, key_positions, softmax, valid, "head")


def weights_of(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor,
    softmax: LogitTransform, valid: Tensor | None, per: str,
) -> Tensor:  # fmt: skip
    """`observation_weights`; with per = "merged" [B, H, 1, N, L], of the group's largest logits."""
    b, h, g, n, d = queries.shape
    packed = queries.float().reshape(b, h, g * n, d) * softmax.scale
    logits = (packed @ keys.float().mT).view(b, h, g, n, -1)
    logits = replace(softmax, scale=1.0).logits(logits)
    if per == "merged":
        logits = logits.amax(dim=2, keepdim=True)
    visible = _visible(query_positions, key_positions, valid)[:, :, None]
    # A finite floor, not -inf: a query that sees nothing gives zeros, while a NaN in queries or
    # keys still reaches the caller, who refuses it.
    logits = logits.masked_fill_(~visible, torch.finfo(torch.float32).min)
    if softmax.sink is None:
        weights = torch.softmax(logits, dim=-1, out=logits)
    else:
        weights = softmax.weights(logits)
    return weights.mul_(visible.any(dim=-1, keepdim=True))


def _visible(query_positions: Tensor, key_positions: Tensor, valid: Tensor | None) -> Tensor:
    """[B, H, N, L] bool."""
    visible = key_positions[:, :, None, :] <= query_positions[:, None, :, None]
    return visible if valid is None else visible & valid[:, None, :, None]
