"""Attention of new queries over fixed slots, grouped-query heads packed; its weights on request."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries handled at once: bounds the mask, however long the prompt.
BLOCK = 256


def slot_attention(
    queries: Tensor, keys: Tensor, values: Tensor, last: Tensor | None, scale: float
) -> Tensor:
    """softmax(q k^T * scale) v over the slots that each query may see.

    Args:
        queries: [B, H, G, n, D].
        keys, values: [B, H, L, D].
        last: [B or 1, n] integer, the last slot that query i may see; None = all L.
        scale: multiplies the logits.

    Returns:
        [B, H, G, n, D] in the queries' dtype.
    """
    b, h, g, n, d = queries.shape
    if n > BLOCK and last is not None:
        blocks = zip(queries.split(BLOCK, 3), last.split(BLOCK, 1), strict=True)
        parts = [slot_attention(q, keys, values, until, scale) for q, until in blocks]
        return torch.cat(parts, dim=3)
    mask = None if last is None else visible(last, keys.shape[2])[:, None].repeat(1, 1, g, 1)
    # The group rides in the query dimension: keys are read once per KV head.
    out = F.scaled_dot_product_attention(
        queries.reshape(b, h, g * n, d), keys, values, attn_mask=mask, scale=scale
    )
    return out.reshape(b, h, g, n, d)


def slot_attention_with_weights(
    queries: Tensor, keys: Tensor, values: Tensor, last: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`slot_attention`, and its weights [B, H, G, n, L] in float32 (zero where not visible)."""
    b, h, g, n, d = queries.shape
    length = keys.shape[2]
    packed = queries.float().reshape(b, h, g * n, d)
    logits = (packed @ keys.float().transpose(-1, -2) * scale).view(b, h, g, n, length)
    if last is not None:
        logits = logits.masked_fill(~visible(last, length)[:, None, None], float("-inf"))
    weights = logits.softmax(dim=-1)
    out = weights.view(b, h, g * n, length) @ values.float()
    return out.to(queries.dtype).view(b, h, g, n, d), weights


def visible(last: Tensor, length: int) -> Tensor:
    """[B, n, L] bool: slot j is visible to query i iff j <= last[i]."""
    return torch.arange(length, device=last.device) <= last[..., None]
