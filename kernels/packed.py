"""Causal attention of whole sequences in which documents are packed, and of sliding windows."""

import torch
from torch import Tensor

from kvpolicies.kernels.attention import BLOCK, SlotMask, slot_attention
from kvpolicies.kernels.logit_transform import LogitTransform


def packed_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    softmax: LogitTransform,
    documents: Tensor | None = None,
    span: int | None = None,
) -> Tensor:
    """softmax(q k^T) v over all keys of each query's document up to it.

    Args:
        queries: [B, H, G, S, D], of all positions 0 .. S - 1.
        keys: [B, H, S, D], of the same positions.
        values: as the keys.
        softmax: the model's.
        documents: [B, S] integer, never falling along a row; None = one document a row.
        span: keys that a query looks back at most, its own included; None = all.

    Returns:
        [B, H, G, S, D] in the queries' dtype. Masks are of BLOCK queries at a time.
    """
    s = keys.shape[2]
    places = torch.arange(s, device=keys.device)[None]
    starts = None
    if documents is not None:
        documents = documents.contiguous()
        starts = torch.searchsorted(documents, documents)
    if span is not None:
        near = places - span + 1
        starts = near if starts is None else torch.maximum(starts, near)
    parts = []
    for first in range(0, s, BLOCK):
        stop = min(first + BLOCK, s)
        own = None if starts is None else starts[:, first:stop]
        # Later keys are nobody's yet: half the work.
        visible = SlotMask(places[:, first:stop], own, places[:, :stop])
        block = queries[:, :, :, first:stop]
        parts.append(
            slot_attention(block, keys[:, :, :stop], values[:, :, :stop], visible, softmax)
        )
    return torch.cat(parts, dim=3)
