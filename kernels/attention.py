"""Attention of new queries over fixed slots, grouped-query heads packed; its weights on request."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicies.kernels.backend import suits
from kvpolicies.kernels.decode import Decoded, decode_attention
from kvpolicies.kernels.logit_transform import LogitTransform

# Queries handled at once: bounds the mask, however long the prompt.
BLOCK = 256


@dataclass(frozen=True)
class SlotMask:
    """Which slots each of n queries sees.

    A sliding window has `first` and `positions`; all heads hold the same positions then.
    """

    last: Tensor | None = None
    """[B or 1, n] slots up to this one; None = all."""
    first: Tensor | None = None
    """[B, n] of these only slots whose position is not before it; None = all."""
    positions: Tensor | None = None
    """[B, L] of the slots, where `first` is given."""

    def blocks(self, n: int) -> "list[tuple[slice, SlotMask]]":
        """Cut into at most BLOCK of the n queries each."""
        if n <= BLOCK:
            return [(slice(0, n), self)]
        parts = [slice(i, min(i + BLOCK, n)) for i in range(0, n, BLOCK)]
        return [(p, SlotMask(_at(self.last, p), _at(self.first, p), self.positions)) for p in parts]

    def mask(self, length: int) -> Tensor | None:
        """[B or 1, n, L] bool, or None if all is visible."""
        mask = None
        if self.last is not None:
            mask = torch.arange(length, device=self.last.device) <= self.last[..., None]
        if self.first is not None:
            assert self.positions is not None
            near = self.positions[:, None] >= self.first[..., None]
            mask = near if mask is None else mask & near
        return mask


def _at(x: Tensor | None, columns: slice) -> Tensor | None:
    return None if x is None else x[:, columns]


def slot_attention(
    queries: Tensor, keys: Tensor, values: Tensor, visible: SlotMask, softmax: LogitTransform
) -> Tensor:
    """softmax(q k^T) v over the slots that each query may see.

    Args:
        queries: [B, H, G, n, D].
        keys: [B, H, L, D].
        values: as the keys.
        visible: which slots each query sees.
        softmax: the model's.

    Returns:
        [B, H, G, n, D] in the queries' dtype.
    """
    if _decodes(queries, keys, values):
        return _decoded(queries, keys, values, visible, softmax, weights=False).out
    parts = []
    for columns, part in visible.blocks(queries.shape[3]):
        mask = part.mask(keys.shape[2])
        mask = None if mask is None else mask[:, None]
        parts.append(masked_attention(queries[:, :, :, columns], keys, values, mask, softmax))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


def masked_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softmax: LogitTransform
) -> Tensor:
    """`slot_attention` under any `mask` [B or 1, H or 1, n, L] bool; None = all is visible."""
    b, h, g, n, d = queries.shape
    if not softmax.plain:
        return _weighted(queries, keys, values, mask, softmax)[0]
    if mask is not None and n > 1:
        mask = mask.repeat(1, 1, g, 1)
    # The group rides in the query dimension: keys are read once per KV head.
    out = F.scaled_dot_product_attention(
        queries.reshape(b, h, g * n, d), keys, values, attn_mask=mask, scale=softmax.scale
    )
    return out.reshape(b, h, g, n, d)


def slot_attention_with_weights(
    queries: Tensor, keys: Tensor, values: Tensor, visible: SlotMask, softmax: LogitTransform
) -> tuple[Tensor, Tensor]:
    """`slot_attention`, and its weights [B, H, G, n, L] in float32 (zero where not visible)."""
    if _decodes(queries, keys, values):
        out, _, row = _decoded(queries, keys, values, visible, softmax, weights=True)
        assert row is not None
        return out, row[:, :, :, None]
    mask = visible.mask(keys.shape[2])
    return _weighted(queries, keys, values, None if mask is None else mask[:, None], softmax)


def _decodes(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """One new token, on Triton: it has a kernel of its own. A prompt is SDPA's business."""
    return queries.shape[3] == 1 and suits(keys, queries, values)


def _decoded(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: SlotMask,
    softmax: LogitTransform,
    weights: bool,
) -> Decoded:
    lengths = None if visible.last is None else (visible.last[:, 0] + 1).expand(len(queries))
    return decode_attention(
        *(queries, keys, values, lengths, softmax),
        first=None if visible.first is None else visible.first[:, 0],
        positions=visible.positions,
        weights=weights,
    )


def _weighted(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softmax: LogitTransform
) -> tuple[Tensor, Tensor]:
    b, h, g, n, d = queries.shape
    length = keys.shape[2]
    products = queries.float().reshape(b, h, g * n, d) @ keys.float().mT
    logits = softmax.logits(products.reshape(b, h, g, n, length))
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None], float("-inf"))
    weights = softmax.weights(logits)
    out = weights.reshape(b, h, g * n, length) @ values.float()
    return out.to(queries.dtype).view(b, h, g, n, d), weights
