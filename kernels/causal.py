"""The log-sum-exp of causal attention: what each query's logits over its past come to.

The Triton form holds one tile of logits at a time. Columns that all queries of a tile see come
without a mask; only those about the diagonal, and about a document's start, are masked. Logits are
taken to base 2, which is what a GPU has. No atomics: the same input gives the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicies.kernels.backend import suits
from kvpolicies.kernels.jit import ceil_div, dense, jit, power_of_2, tl
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.tiles import FLOOR, as_logits, product

# Queries handled at once in torch: bounds the logits, however long the sequence.
BLOCK = 128
LN_2 = math.log(2) if tl is None else tl.constexpr(math.log(2))
LOG2_E = 1 / math.log(2) if tl is None else tl.constexpr(1 / math.log(2))

# (bytes a number, the wider operand's; D padded) -> (queries a tile, keys a tile, warps).
BLOCKS = {
    (2, 64): (128, 64, 8),
    (2, 128): (128, 64, 8),
    (2, 256): (64, 64, 4),
    (4, 64): (32, 64, 8),
    (4, 128): (16, 32, 8),
    (4, 256): (16, 16, 4),
}


def causal_lse(
    queries: Tensor,
    keys: Tensor,
    softmax: LogitTransform,
    documents: Tensor | None = None,
    expires: Tensor | None = None,
) -> Tensor:
    """log of the sum of exp(logit) over all keys up to each query, a model's sink included.

    Args:
        queries: [B, H, G, S, D], post-RoPE, of all positions 0 .. S - 1.
        keys: [B, H, S, D], of the same positions.
        documents: [B, S] integer, never falling along a row: a query sees its own document only.
            None = one document a row.
        expires: [B, H, S] int32, the first query that no longer sees each key, as `retain` gives
            it: the sum of a cache that evicts. None = nothing is evicted.

    Returns:
        [B, H, G, S] float32; -inf where a query sees nothing. Memory O(BLOCK * S) a head.
    """
    starts = None
    if documents is not None:
        documents = documents.contiguous()
        starts = torch.searchsorted(documents, documents, out_int32=True)
    form = _triton if suits(keys, queries) else _reference
    return form(queries, keys, softmax, starts, expires)


def grouped_logits(queries: Tensor, keys: Tensor, softmax: LogitTransform) -> Tensor:
    """[B, H, G, n, L] float32 of queries [B, H, G, n, D] and keys [B, H, L, D]."""
    b, h, g, n, d = queries.shape
    products = queries.float().reshape(b, h, g * n, d) @ keys.float().transpose(-1, -2)
    return softmax.logits(products.view(b, h, g, n, keys.shape[2]))


def _reference(
    queries: Tensor,
    keys: Tensor,
    softmax: LogitTransform,
    starts: Tensor | None,
    expires: Tensor | None,
) -> Tensor:
    """Block by block of queries; `starts` [B, S]: where each one's document begins."""
    parts = []
    # The widest first: what it leaves free holds the others, while a heap of blocks that widen
    # comes to S x S.
    for first in reversed(range(0, queries.shape[3], BLOCK)):
        block = queries[:, :, :, first : first + BLOCK]
        stop = first + block.shape[3]
        earliest = 0 if starts is None else int(starts[:, first].min())
        logits = grouped_logits(block, keys[:, :, earliest:stop], softmax)
        t = torch.arange(earliest, stop, device=keys.device)
        hidden = (t > t[first - earliest :, None])[None]
        if starts is not None:
            hidden = hidden | (t < starts[:, first:stop, None])
        hidden = hidden[:, None]  # [1 or B, 1 or H, queries, keys]
        if expires is not None:
            hidden = hidden | (expires[:, :, None, earliest:stop] <= t[first - earliest :, None])
        logits = logits.masked_fill(hidden[:, :, None], float("-inf"))
        parts.append(logits.logsumexp(dim=-1))
    lse = torch.cat(parts[::-1], dim=-1)
    if softmax.sink is None:
        return lse
    return torch.logaddexp(lse, softmax.sink.float()[None, :, :, None])


def _triton(
    queries: Tensor,
    keys: Tensor,
    softmax: LogitTransform,
    starts: Tensor | None,
    expires: Tensor | None,
) -> Tensor:
    b, h, g, length, d = queries.shape
    queries, keys = dense(queries), dense(keys)
    block_d = power_of_2(d, 16)
    size = max(queries.element_size(), keys.element_size())
    block_r, block_c, warps = BLOCKS[size, max(64, block_d)]
    block_r = min(block_r, power_of_2(length, 16))
    out = queries.new_empty(b, h, g, length, dtype=torch.float32)
    _lse_kernel[ceil_div(length, block_r) * b * h * g,](
        # An argument that a program does not use still must be a tensor.
        *(queries, keys, out if starts is None else starts),
        out if expires is None else expires.to(torch.int32).contiguous(),
        *(out if softmax.sink is None else softmax.sink.contiguous(), out),
        *(*queries.stride()[:4], *keys.stride()[:3], h, g, length),
        *(softmax.scale / math.log(2), (softmax.cap or 0.0) / math.log(2)),
        D=d,
        BLOCK_D=block_d,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        CAPPED=softmax.cap is not None,
        HAS_SINK=softmax.sink is not None,
        HAS_DOCUMENTS=starts is not None,
        HAS_EXPIRES=expires is not None,
        num_warps=warps,
    )
    return out


@jit
def absorbed(top, total, logits):
    """Row maxima and sums of 2 ** (logit - top), [R] each, with those of logits [R, C] taken in.

    Logits of what is not seen are -inf; `top` starts at FLOOR, so that no difference is a NaN.
    """
    higher = tl.maximum(top, tl.max(logits, axis=1))
    total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), axis=1)
    return higher, total


@jit
def natural(top, total):
    """top + log2(total) to base e: -inf where nothing was seen."""
    lse = (top + tl.log2(tl.where(total == 0, 1.0, total))) * LN_2
    return tl.where(total == 0, float("-inf"), lse)


@jit
def _step(
    top, total, q, p_k, p_expires, row, start, first, length, s_kt, scale, cap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    CAPPED: tl.constexpr, HAS_EXPIRES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys first .. first + BLOCK_C - 1, of which a row sees start .. row, unless evicted."""
    o_d = tl.arange(0, BLOCK_D)
    column = first + tl.arange(0, BLOCK_C)
    m_k = (o_d < D)[:, None]
    if MASKED:
        m_k = m_k & ((column >= 0) & (column < length))[None, :]
    k = tl.load(p_k + column[None, :].to(tl.int64) * s_kt + o_d[:, None], mask=m_k, other=0.0)
    logits = as_logits(product(q, k), scale, cap, CAPPED)
    if MASKED:
        sees = (column[None, :] <= row[:, None]) & (column[None, :] >= start[:, None])
        logits = tl.where(sees, logits, float("-inf"))
    if HAS_EXPIRES:
        m_column = (column >= 0) & (column < length)
        expires = tl.load(p_expires + column, mask=m_column, other=0)
        logits = tl.where(expires[None, :] > row[:, None], logits, float("-inf"))
    return absorbed(top, total, logits)


@jit(varying=("length",))
def _lse_kernel(
    p_q,  # [B, H, G, S, D]
    p_k,  # [B, H, S, D]
    p_start,  # [B, S] int32: the first of each query's document
    p_expires,  # [B, H, S] int32: the first query that no longer sees each key
    p_sink,  # [H, G]
    p_out,  # [B, H, G, S]
    s_qb, s_qh, s_qg, s_qt, s_kb, s_kh, s_kt,
    heads, groups, length, scale, cap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    CAPPED: tl.constexpr, HAS_SINK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_EXPIRES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, BLOCK_R)
    bhg = (tl.program_id(0) // tiles).to(tl.int64)
    b, hg = bhg // (heads * groups), bhg % (heads * groups)
    h, g = hg // groups, hg % groups
    # The longest past comes first, so that short programs fill the gaps.
    begin = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_R
    row = begin + tl.arange(0, BLOCK_R)
    m_row = row < length
    row = tl.minimum(row, length - 1)
    o_d = tl.arange(0, BLOCK_D)
    p_q += b * s_qb + h * s_qh + g * s_qg
    p_k += b * s_kb + h * s_kh
    p_expires += (b * heads + h) * length
    p_row = p_q + row[:, None].to(tl.int64) * s_qt + o_d[None, :]
    q = tl.load(p_row, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
    earliest, latest, start = 0, 0, row * 0
    if HAS_DOCUMENTS:
        p_start += b * length
        start = tl.load(p_start + row)
        earliest = tl.load(p_start + begin)
        latest = tl.load(p_start + tl.minimum(begin + BLOCK_R, length) - 1)
    top = tl.full([BLOCK_R], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if HAS_SINK:
        top = tl.zeros([BLOCK_R], tl.float32) + tl.load(p_sink + hg).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_R], 1.0, tl.float32)
    # All rows see `full` whole tiles before `begin`; masked ones lie before these, and from `begin`
    # on, where there are `edge`.
    full = tl.maximum(begin - latest, 0) // BLOCK_C
    whole = begin - full * BLOCK_C
    edge = tl.cdiv(BLOCK_R, BLOCK_C)
    before = tl.cdiv(whole - earliest, BLOCK_C)
    for i in range(before + edge):
        gap = tl.where(i < before, 0, full * BLOCK_C)
        first = whole + (i - before) * BLOCK_C + gap
        top, total = _step(
            top, total, q, p_k, p_expires, row, start, first, length, s_kt, scale, cap,
            D, BLOCK_D, BLOCK_C, CAPPED, HAS_EXPIRES, True,
        )  # fmt: skip
    for i in range(full):
        top, total = _step(
            top, total, q, p_k, p_expires, row, start, whole + i * BLOCK_C, length, s_kt, scale,
            cap, D, BLOCK_D, BLOCK_C, CAPPED, HAS_EXPIRES, False,
        )  # fmt: skip
    tl.store(p_out + bhg * length + row, natural(top, total), mask=m_row)
