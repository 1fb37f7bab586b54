"""Observation scores: how much each cached key is attended by a few observation queries.

The Triton form never holds queries x slots in memory. One launch gives each query its log-sum-exp
over the slots (split among programs, so that few heads still fill a GPU); a second multiplies again
and pools the weights slot by slot. No atomics: the same input gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicies.kernels.backend import suits
from kvpolicies.kernels.jit import ceil_div, dense, jit, power_of_2, tl
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.tiles import FLOOR, as_logits, product
from kvpolicies.kernels.weights import weights_of

POOLS = ("max", "mean", "sum")
PER = ("group", "head", "merged")

# (bytes a number of queries, of keys, D padded) -> (queries a tile, slots a tile, warps).
BLOCKS = {
    **{(2, 2, d): (64, 64, 4) for d in (64, 128)},
    (2, 2, 256): (32, 64, 4),
    **{(4, 2, d): (32, 64, 8) for d in (64, 128)},
    (4, 2, 256): (16, 64, 8),
    **{(q, 4, 64): (16, 32, 8) for q in (2, 4)},
    **{(q, 4, 128): (16, 64, 8) for q in (2, 4)},
    **{(q, 4, 256): (16, 16, 4) for q in (2, 4)},
}
# Weights that the torch form holds at once.
HELD = 1 << 18
# Programs that fill a large GPU twice over, and the most parts that slots are split into for it.
PROGRAMS, MOST_SPLITS = 264, 16


def observation_scores(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    softmax: LogitTransform | float,
    valid: Tensor | None = None,
    pool: str = "max",
    per: str = "group",
) -> Tensor:
    """`observation_weights` (weights.py), pooled over the queries.

    Args:
        queries: as there.
        keys: as there.
        query_positions: as there.
        key_positions: as there.
        softmax: as there.
        valid: as there.
        pool: `max`, `sum`, or `mean`, the sum divided by how many queries are valid.
        per: `group` pools over queries and the group's heads; `head` over queries alone; `merged`
            makes one head of the group first, whose logits are the maximum of the heads' (R-KV);
            a model's sink, which is a head's own, then plays no part.

    Returns:
        [B, H, L] float32, [B, H, G, L] if per = "head".

    Raises:
        ValueError: for a pool or `per` of another name.
    """
    if pool not in POOLS or per not in PER:
        raise ValueError(f"pool must be one of {POOLS} and per of {PER}, got {pool!r}, {per!r}")
    if not isinstance(softmax, LogitTransform):
        softmax = LogitTransform(softmax)
    if per == "merged":
        softmax = LogitTransform(softmax.scale, softmax.cap)
    form = _triton if suits(keys, queries) else _reference
    total = form(queries, keys, query_positions, key_positions, softmax, valid, pool, per)
    if pool != "mean":
        return total
    heads = queries.shape[2] if per == "group" else 1
    if valid is None:
        return total / (queries.shape[3] * heads)
    count = (valid.sum(dim=1) * heads).clamp_min(1)
    return total / count.view(-1, *[1] * (total.dim() - 1))


def _reference(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor,
    softmax: LogitTransform, valid: Tensor | None, pool: str, per: str,
) -> Tensor:  # fmt: skip
    """Maximum or sum; a few rows at a time, whose weights stay in a CPU's cache."""
    b, h, g, n, _ = queries.shape
    rows = max(1, HELD // (h * g * n * keys.shape[2]))
    parts = []
    for i in range(0, b, rows):
        few = slice(i, i + rows)
        its = None if valid is None else valid[few]
        places = (query_positions[few], key_positions[few])
        weights = weights_of(queries[few], keys[few], *places, softmax, its, per)
        parts.append(weights.amax(dim=3) if pool == "max" else weights.sum(dim=3))
    total = torch.cat(parts)
    if per == "head":
        return total
    return total.amax(dim=2) if pool == "max" else total.sum(dim=2)


def _triton(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor,
    softmax: LogitTransform, valid: Tensor | None, pool: str, per: str,
) -> Tensor:  # fmt: skip
    """Computes the scores in two launches. Between them: 2 numbers a query and split."""
    b, h, g, n, d = queries.shape
    length = keys.shape[2]
    queries, when = queries.contiguous(), query_positions.contiguous()
    keys, at = dense(keys), dense(key_positions)
    rows = n if per == "merged" else g * n
    each = n if per == "head" else rows
    block_d = power_of_2(d, 16)
    kind = (queries.element_size(), keys.element_size(), max(64, block_d))
    block_r, block_l, warps = BLOCKS[kind]
    block = min(block_r, power_of_2(rows, 16))
    tiles, columns = ceil_div(rows, block), ceil_div(length, block_l)
    span = ceil_div(columns, min(MOST_SPLITS, ceil_div(PROGRAMS, b * h * tiles), columns))
    splits = ceil_div(columns, span)
    top, total = queries.new_empty(2, b * h, splits, rows, dtype=torch.float32)
    out = queries.new_empty(b, h, rows // each, length, dtype=torch.float32)
    shared = [queries, keys, when, at, when if valid is None else valid.contiguous(), top, total]
    shared += [*keys.stride()[:3], *at.stride()[:2], h, g, n, rows, length, splits]
    shared += [softmax.scale, softmax.cap or 0.0]
    constants = {"D": d, "BLOCK_D": block_d, "BLOCK_L": block_l, "MERGED": per == "merged"}
    constants |= {"CAPPED": softmax.cap is not None, "HAS_VALID": valid is not None}
    _lse_kernel[b * h, tiles, splits](
        *shared, span * block_l, BLOCK_R=block, **constants, num_warps=warps
    )
    _pool_kernel[b * h, rows // each, columns](
        *shared,
        *(top if softmax.sink is None else softmax.sink.contiguous(), out, each),
        BLOCK_R=min(block_r, power_of_2(each, 16)),
        HAS_SINK=softmax.sink is not None,
        LARGEST=pool == "max",
        **constants,
        num_warps=warps,
    )
    return out if per == "head" else out[:, :, 0]


@jit
def _logits(
    p_q, m_q, k, groups, step, scale, cap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MERGED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """[R, L] of queries p_q [R, D] and keys [D, L].

    A group's next head lies `step` further on; merged, the maximum of all is taken.
    """
    if MERGED:
        logits = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
        for g in range(groups):
            q = tl.load(p_q + g * step, mask=m_q, other=0.0)
            one = product(q, k)
            # Not a number wins, and stays.
            logits = tl.where((one > logits) | (one != one), one, logits)
    else:
        q = tl.load(p_q, mask=m_q, other=0.0)
        logits = product(q, k)
    return as_logits(logits, scale, cap, CAPPED)


@jit
def _lse_kernel(
    p_q,  # [B, H, G, N, D]
    p_k,  # [B, H, L, D]
    p_when,  # [B, N]
    p_at,  # [B, H, L]
    p_valid,  # [B, N] bool
    p_top,  # [B * H, splits, rows]: the largest logit seen
    p_total,  # [B * H, splits, rows]: the sum of exp(logit - top)
    s_kb, s_kh, s_kl, s_ab, s_ah,
    heads, groups, n, rows, length, splits, scale, cap, span,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
    MERGED: tl.constexpr, CAPPED: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    part = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_row = row < rows
    when = tl.load(p_when + b * n + row % n, mask=m_row, other=0)
    exists = m_row
    if HAS_VALID:
        exists = tl.load(p_valid + b * n + row % n, mask=m_row, other=0) != 0
    o_d = tl.arange(0, BLOCK_D)
    p_row = p_q + bh * groups * n * D + row[:, None] * D + o_d[None, :]
    m_q = m_row[:, None] & (o_d < D)[None, :]
    top, total = tl.full([BLOCK_R], FLOOR, tl.float32), tl.zeros([BLOCK_R], tl.float32)
    last = tl.minimum(part * span + span, length)
    for first in range(part * span, last, BLOCK_L):
        slot = first + tl.arange(0, BLOCK_L)
        m_l = slot < last
        p_key = p_k + b * s_kb + h * s_kh + slot[None, :].to(tl.int64) * s_kl + o_d[:, None]
        k = tl.load(p_key, mask=m_l[None, :] & (o_d < D)[:, None], other=0.0)
        at = tl.load(p_at + b * s_ab + h * s_ah + slot, mask=m_l, other=0)
        logits = _logits(p_row, m_q, k, groups, n * D, scale, cap, BLOCK_R, BLOCK_L, MERGED, CAPPED)
        sees = exists[:, None] & m_l[None, :] & (at[None, :] <= when[:, None])
        logits = tl.where(sees, logits, FLOOR)
        higher = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.where(sees, tl.exp(logits - higher[:, None]), 0.0)
        total = total * tl.exp(top - higher) + tl.sum(weights, axis=1)
        top = higher
    p_out = (bh * splits + part) * rows + row
    tl.store(p_top + p_out, top, mask=m_row)
    tl.store(p_total + p_out, total, mask=m_row)


@jit
def _pool_kernel(
    p_q, p_k, p_when, p_at, p_valid, p_top, p_total,  # as above
    s_kb, s_kh, s_kl, s_ab, s_ah,
    heads, groups, n, rows, length, splits, scale, cap,
    p_sink,  # [H, G]
    p_out,  # [B, H, rows / each, L]
    each,  # queries pooled into one score a slot
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
    MERGED: tl.constexpr, CAPPED: tl.constexpr, HAS_VALID: tl.constexpr,
    HAS_SINK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    o_d = tl.arange(0, BLOCK_D)
    slot = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    m_l = slot < length
    p_key = p_k + b * s_kb + h * s_kh + slot[None, :].to(tl.int64) * s_kl + o_d[:, None]
    k = tl.load(p_key, mask=m_l[None, :] & (o_d < D)[:, None], other=0.0)
    at = tl.load(p_at + b * s_ab + h * s_ah + slot, mask=m_l, other=0)
    p_q += bh * groups * n * D
    mass = tl.zeros([BLOCK_L], tl.float32)
    peak = tl.zeros([BLOCK_L], tl.float32)
    for first in range(0, each, BLOCK_R):
        o_r = first + tl.arange(0, BLOCK_R)
        m_row = o_r < each
        row = tl.program_id(1) * each + o_r
        when = tl.load(p_when + b * n + row % n, mask=m_row, other=0)
        top = tl.full([BLOCK_R], FLOOR, tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
        if HAS_SINK:
            top = tl.load(p_sink + h * groups + row // n, mask=m_row, other=0.0).to(tl.float32)
            total = tl.full([BLOCK_R], 1.0, tl.float32)
        for part in range(splits):
            p_part = (bh * splits + part) * rows + row
            its_top = tl.load(p_top + p_part, mask=m_row, other=FLOOR)
            its_total = tl.load(p_total + p_part, mask=m_row, other=0.0)
            higher = tl.maximum(top, its_top)
            total = total * tl.exp(top - higher) + its_total * tl.exp(its_top - higher)
            top = higher
        lse = tl.where(total == 0, 0.0, top + tl.log(tl.where(total == 0, 1.0, total)))
        exists = m_row
        if HAS_VALID:
            exists = tl.load(p_valid + b * n + row % n, mask=m_row, other=0) != 0
        p_row = p_q + row[:, None] * D + o_d[None, :]
        m_q = m_row[:, None] & (o_d < D)[None, :]
        logits = _logits(p_row, m_q, k, groups, n * D, scale, cap, BLOCK_R, BLOCK_L, MERGED, CAPPED)
        sees = exists[:, None] & (at[None, :] <= when[:, None])
        # Zero at FLOOR, unless lse is not a number.
        weights = tl.exp(tl.where(sees, logits, FLOOR) - lse[:, None])
        mass += tl.sum(weights, axis=0)
        peak = tl.maximum(peak, tl.max(weights, axis=0))
    # A GPU's maximum drops what is not a number; the sum keeps it.
    score = tl.where(mass == mass, peak, mass) if LARGEST else mass
    tl.store(p_out + (bh * (rows // each) + tl.program_id(1)) * length + slot, score, mask=m_l)
