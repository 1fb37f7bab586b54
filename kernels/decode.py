"""Attention of one new query a head over fixed slots: the decode step's own kernel.

The group's queries are one tile, so keys and values are read once a KV head; slots are split among
programs, so that few heads still fill a GPU, and a second launch joins the parts. Lengths lie on
the device: a step over all slots has one shape however many are filled, as a CUDA graph needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicies.kernels.backend import suits
from kvpolicies.kernels.jit import ceil_div, dense, jit, power_of_2, tl
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.tiles import FLOOR, as_logits, product

# (bytes a number of keys, D padded) -> (slots a tile, warps).
BLOCKS = {
    (2, 64): (64, 4),
    (2, 128): (64, 4),
    (2, 256): (32, 4),
    (4, 64): (32, 4),
    (4, 128): (32, 8),
    (4, 256): (16, 4),
}
# Programs that fill a large GPU twice over, and the most parts that slots are split into for it.
PROGRAMS, MOST_SPLITS = 264, 32


class Decoded(NamedTuple):
    """What one query a head got."""

    out: Tensor
    """[B, H, G, 1, D] in the queries' dtype; zeros where nothing is seen."""
    lse: Tensor
    """[B, H, G] float32: log of the sum of exp(logit), a model's sink included."""
    weights: Tensor | None
    """[B, H, G, C] float32, zero where not seen; None unless asked for."""


def decode_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | None,
    softmax: LogitTransform,
    *,
    first: Tensor | None = None,
    positions: Tensor | None = None,
    weights: bool = False,
) -> Decoded:
    """softmax(q k^T) v over the filled slots.

    Args:
        queries: [B, H, G, 1, D].
        keys: [B, H, C, D]; nothing is read behind a row's length.
        values: as the keys.
        lengths: [B] integer, on the device: the filled slots of each row; None = all C.
        first: [B] integer, with `positions` [B, C]: of the filled slots only those whose position
            is not before it (a sliding window; all heads hold the same positions).
        weights: return the attention row too.
    """
    form = _triton if suits(keys, queries, values) else _reference
    return form(queries, keys, values, lengths, softmax, first, positions, weights)


def _reference(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None, softmax: LogitTransform,
    first: Tensor | None, positions: Tensor | None, weights: bool,
) -> Decoded:  # fmt: skip
    q, k = queries[:, :, :, 0].float(), keys.float()
    logits = softmax.logits(q @ k.transpose(-1, -2))  # [B, H, G, C]
    seen = torch.ones(1, keys.shape[2], dtype=torch.bool, device=keys.device)
    if lengths is not None:
        seen = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None]
    if first is not None:
        assert positions is not None
        seen = seen & (positions >= first[:, None])
    logits = logits.masked_fill(~seen[:, None, None], float("-inf"))
    lse = logits.logsumexp(dim=-1)
    if softmax.sink is not None:
        lse = torch.logaddexp(lse, softmax.sink.float()[None])
    norm = lse.masked_fill(lse == float("-inf"), 0.0)
    row = (logits - norm[..., None]).exp()
    filled = values.float().masked_fill(~seen[:, None, :, None], 0.0)
    out = (row @ filled).to(queries.dtype)[:, :, :, None]
    return Decoded(out, lse, row if weights else None)


def _triton(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None, softmax: LogitTransform,
    first: Tensor | None, positions: Tensor | None, weights: bool,
) -> Decoded:  # fmt: skip
    b, h, g, _, d = queries.shape
    length = keys.shape[2]
    queries, keys, values = queries.contiguous(), dense(keys), dense(values)
    block_d, block_g = power_of_2(d, 16), power_of_2(g, 16)
    block_l, warps = BLOCKS[keys.element_size(), max(64, block_d)]
    columns = ceil_div(length, block_l)
    span = ceil_div(columns, min(MOST_SPLITS, ceil_div(PROGRAMS, b * h), columns))
    splits = ceil_div(columns, span)
    top, total = queries.new_empty(2, b * h, splits, g, dtype=torch.float32)
    part = queries.new_empty(b * h, splits, g, d, dtype=torch.float32)
    row = queries.new_empty(b, h, g, length if weights else 1, dtype=torch.float32)
    out = torch.empty_like(queries)
    lse = queries.new_empty(b, h, g, dtype=torch.float32)
    # An argument that a program does not use still must be a tensor.
    where = top if positions is None else dense(positions)
    filled = top if lengths is None else lengths
    limits = [filled, top if first is None else first, where]
    limits += [t.stride(0) for t in limits]
    constants = {"D": d, "BLOCK_G": block_g, "BLOCK_D": block_d, "BLOCK_L": block_l}
    constants |= {"HAS_LENGTHS": lengths is not None, "HAS_ROW": weights}
    _part_kernel[b * h, splits](
        *(queries, keys, values, *limits, top, total, part, row),
        *(*keys.stride()[:3], *values.stride()[:3], h, g, length, splits, span * block_l),
        *(softmax.scale, softmax.cap or 0.0),
        CAPPED=softmax.cap is not None,
        HAS_FIRST=first is not None,
        **constants,
        num_warps=warps,
    )
    _join_kernel[b * h, splits if weights else 1](
        *(filled, filled.stride(0), top, total, part, row),
        *(top if softmax.sink is None else softmax.sink.contiguous(), out, lse),
        *(h, g, length, splits, span * block_l),
        HAS_SINK=softmax.sink is not None,
        **constants,
        num_warps=4,
    )
    return Decoded(out, lse, row if weights else None)


@jit(varying=("length", "splits", "span"))
def _part_kernel(
    p_q,  # [B, H, G, D]
    p_k, p_v,  # [B, H, C, D]
    p_length, p_first,  # [B]
    p_at,  # [B, C]
    s_length, s_first, s_at,
    p_top,  # [B * H, splits, G]: the largest logit
    p_total,  # [B * H, splits, G]: the sum of exp(logit - top)
    p_part,  # [B * H, splits, G, D]: the values summed by exp(logit - top)
    p_row,  # [B, H, G, C]: logits
    s_kb, s_kh, s_kl, s_vb, s_vh, s_vl,
    heads, groups, length, splits, span, scale, cap,
    D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    CAPPED: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_ROW: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    part = tl.program_id(1)
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g, m_d = o_g < groups, o_d < D
    m_out = m_g[:, None] & m_d[None, :]
    q = tl.load(p_q + (bh * groups + o_g[:, None]) * D + o_d[None, :], mask=m_out, other=0.0)
    stop = length
    if HAS_LENGTHS:
        stop = tl.minimum(length, tl.load(p_length + b * s_length).to(tl.int32))
    top = tl.full([BLOCK_G], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    p_k += b * s_kb + h * s_kh
    p_v += b * s_vb + h * s_vh
    for first in range(part * span, tl.minimum(part * span + span, stop), BLOCK_L):
        slot = first + tl.arange(0, BLOCK_L)
        sees = slot < stop
        far = slot.to(tl.int64)
        p_key = p_k + far[None, :] * s_kl + o_d[:, None]
        k = tl.load(p_key, mask=sees[None, :] & m_d[:, None], other=0.0)
        p_value = p_v + far[:, None] * s_vl + o_d[None, :]
        v = tl.load(p_value, mask=sees[:, None] & m_d[None, :], other=0.0)
        if HAS_FIRST:
            at = tl.load(p_at + b * s_at + slot, mask=sees, other=0)
            sees = sees & (at >= tl.load(p_first + b * s_first))
        logits = as_logits(product(q, k), scale, cap, CAPPED)
        logits = tl.where(sees[None, :], logits, FLOOR)
        if HAS_ROW:
            p_logit = p_row + (bh * groups + o_g[:, None]) * length + slot[None, :]
            tl.store(p_logit, logits, mask=m_g[:, None] & (slot < stop)[None, :])
        higher = tl.maximum(top, tl.max(logits, axis=1))
        shrink = tl.exp(top - higher)
        weights = tl.where(sees[None, :], tl.exp(logits - higher[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + product(weights, v)
        top = higher
    p_out = (bh * splits + part) * groups + o_g
    tl.store(p_top + p_out, top, mask=m_g)
    tl.store(p_total + p_out, total, mask=m_g)
    tl.store(p_part + p_out[:, None] * D + o_d[None, :], acc, mask=m_out)


@jit(varying=("length", "splits", "span"))
def _join_kernel(
    p_length, s_length, p_top, p_total, p_part, p_row,  # as above
    p_sink,  # [H, G]
    p_out,  # [B, H, G, D]
    p_lse,  # [B, H, G]
    heads, groups, length, splits, span,
    D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1)
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g = o_g < groups
    m_out = m_g[:, None] & (o_d < D)[None, :]
    top = tl.full([BLOCK_G], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if HAS_SINK:
        top = tl.load(p_sink + bh % heads * groups + o_g, mask=m_g, other=0.0).to(tl.float32)
        total = tl.full([BLOCK_G], 1.0, tl.float32)
    for part in range(splits):
        p_in = (bh * splits + part) * groups + o_g
        its_top = tl.load(p_top + p_in, mask=m_g, other=FLOOR)
        its_total = tl.load(p_total + p_in, mask=m_g, other=0.0)
        its_acc = tl.load(p_part + p_in[:, None] * D + o_d[None, :], mask=m_out, other=0.0)
        higher = tl.maximum(top, its_top)
        old, new = tl.exp(top - higher), tl.exp(its_top - higher)
        total = total * old + its_total * new
        acc = acc * old[:, None] + its_acc * new[:, None]
        top = higher
    share = tl.where(total == 0, 1.0, total)
    lse = top + tl.log(share)
    if own == 0:
        p_rows = bh * groups + o_g
        tl.store(p_lse + p_rows, tl.where(total == 0, float("-inf"), lse), mask=m_g)
        out = (acc / share[:, None]).to(p_out.dtype.element_ty)
        tl.store(p_out + p_rows[:, None] * D + o_d[None, :], out, mask=m_out)
    if HAS_ROW:
        stop = length
        if HAS_LENGTHS:
            stop = tl.minimum(length, tl.load(p_length + bh // heads * s_length).to(tl.int32))
        # What saw nothing has lse = FLOOR: its logits, all FLOOR, must not come to exp(0).
        norm = tl.where(total == 0, 0.0, lse)
        for first in range(own * span, tl.minimum(own * span + span, length), BLOCK_L):
            slot = first + tl.arange(0, BLOCK_L)
            p_logit = p_row + (bh * groups + o_g[:, None]) * length + slot[None, :]
            m_row = m_g[:, None] & (slot < length)[None, :]
            logits = tl.load(p_logit, mask=m_row & (slot < stop)[None, :], other=FLOOR)
            tl.store(p_logit, tl.exp(logits - norm[:, None]), mask=m_row)
