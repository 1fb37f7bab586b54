"""Future attention mass: how much each key is attended by the queries that come `delay` later.

"Transposed attention" (KVpop, arXiv 2607.05061): rows are keys, columns are queries, every column
is shifted by minus its own log-sum-exp, and the row's log-sum-exp is the answer. The Triton form
holds one tile at a time. Queries that all keys of a tile wait for come without a mask; only those
about the diagonal, and about a document's end, are masked. No atomics: the same input gives the
same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicies.kernels.backend import suits
from kvpolicies.kernels.causal import LOG2_E, absorbed, grouped_logits, natural
from kvpolicies.kernels.jit import ceil_div, dense, jit, power_of_2, tl
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.tiles import FLOOR, as_logits, product

# Keys handled at once in torch: bounds the logits, however long the sequence.
BLOCK = 128

# (bytes a number, the wider operand's; D padded) -> (keys a tile, queries a tile, warps).
BLOCKS = {
    (2, 64): (128, 64, 8),
    (2, 128): (128, 64, 8),
    (2, 256): (64, 64, 4),
    (4, 64): (32, 64, 8),
    (4, 128): (16, 64, 8),
    (4, 256): (16, 16, 4),
}


def future_log_mass(
    queries: Tensor,
    keys: Tensor,
    lse: Tensor,
    softmax: LogitTransform,
    delay: int,
    documents: Tensor | None = None,
) -> Tensor:
    """log of the attention that each key gets from all queries at least `delay` after it.

    Args:
        queries: [B, H, G, S, D], post-RoPE, of all positions 0 .. S - 1.
        keys: [B, H, S, D], of the same positions.
        lse: [B, H, G, S] float32, as `causal_lse` gives it: a sink is in it already.
        softmax: the model's.
        delay: in tokens; 0 counts a token's own query too.
        documents: [B, S] integer, never falling along a row: only queries of the key's own
            document count. None = one document a row.

    Returns:
        [B, H, G, S] float32: Y[t] = logsumexp over d >= t + delay of (logit(q_d, k_t) - lse_d);
        -inf where there is no such d. Memory O(BLOCK * S) a head.

    Raises:
        ValueError: for a negative delay.
    """
    if delay < 0:
        raise ValueError(f"delay must be at least 0, got {delay}: later queries only see a key")
    ends = None
    if documents is not None:
        documents = documents.contiguous()
        ends = torch.searchsorted(documents, documents, right=True, out_int32=True)
    form = _triton if suits(keys, queries) else _reference
    return form(queries, keys, lse, softmax, min(delay, keys.shape[2]), ends)


def _reference(
    queries: Tensor,
    keys: Tensor,
    lse: Tensor,
    softmax: LogitTransform,
    delay: int,
    ends: Tensor | None,
) -> Tensor:
    """Block by block of keys; `ends` [B, S]: behind the last of each one's document."""
    length = keys.shape[2]
    out = torch.full_like(lse, float("-inf"), dtype=torch.float32)
    for first in range(0, length - delay, BLOCK):
        stop, earliest = min(first + BLOCK, length), first + delay
        latest = length if ends is None else int(ends[:, stop - 1].max())
        if latest <= earliest:
            continue
        d = torch.arange(earliest, latest, device=keys.device)[:, None]
        logits = grouped_logits(queries[:, :, :, earliest:latest], keys[:, :, first:stop], softmax)
        logits = logits - lse[:, :, :, earliest:latest, None]  # [B, H, G, queries, keys]
        counts = (d >= torch.arange(first, stop, device=keys.device) + delay)[None]
        if ends is not None:
            counts = counts & (d < ends[:, None, first:stop])
        logits = logits.masked_fill(~counts[:, None, None], float("-inf"))
        out[:, :, :, first:stop] = logits.logsumexp(dim=-2)
    return out


def _triton(
    queries: Tensor,
    keys: Tensor,
    lse: Tensor,
    softmax: LogitTransform,
    delay: int,
    ends: Tensor | None,
) -> Tensor:
    b, h, g, length, d = queries.shape
    queries, keys, lse = dense(queries), dense(keys), lse.contiguous()
    block_d = power_of_2(d, 16)
    size = max(queries.element_size(), keys.element_size())
    block_r, block_c, warps = BLOCKS[size, max(64, block_d)]
    block_r = min(block_r, power_of_2(length, 16))
    out = queries.new_empty(b, h, g, length, dtype=torch.float32)
    _mass_kernel[ceil_div(length, block_r) * b * h * g,](
        # An argument that a program does not use still must be a tensor.
        *(queries, keys, lse, lse if ends is None else ends, out),
        *(*queries.stride()[:4], *keys.stride()[:3], h, g, length, delay),
        *(softmax.scale / math.log(2), (softmax.cap or 0.0) / math.log(2)),
        D=d,
        BLOCK_D=block_d,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        CAPPED=softmax.cap is not None,
        HAS_DOCUMENTS=ends is not None,
        num_warps=warps,
    )
    return out


@jit
def _step(
    top, total, k, p_q, p_lse, after, end, first, length, s_qt, scale, cap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The queries first .. first + BLOCK_C - 1, of which after .. end - 1 count for a row."""
    o_d = tl.arange(0, BLOCK_D)
    column = first + tl.arange(0, BLOCK_C)
    p_column = p_q + column[None, :].to(tl.int64) * s_qt + o_d[:, None]
    m_q = (o_d < D)[:, None]
    if MASKED:
        m_column = column < length
        q = tl.load(p_column, mask=m_q & m_column[None, :], other=0.0)
        lse = tl.load(p_lse + column, mask=m_column, other=0.0)
    else:
        q = tl.load(p_column, mask=m_q, other=0.0)
        lse = tl.load(p_lse + column)
    logits = as_logits(product(k, q), scale, cap, CAPPED) - lse[None, :] * LOG2_E
    if MASKED:
        counts = (column[None, :] >= after[:, None]) & (column[None, :] < end[:, None])
        logits = tl.where(counts, logits, float("-inf"))
    return absorbed(top, total, logits)


@jit(varying=("length", "delay"))
def _mass_kernel(
    p_q,  # [B, H, G, S, D]
    p_k,  # [B, H, S, D]
    p_lse,  # [B, H, G, S]
    p_end,  # [B, S] int32: behind the last of each key's document
    p_out,  # [B, H, G, S]
    s_qb, s_qh, s_qg, s_qt, s_kb, s_kh, s_kt,
    heads, groups, length, delay, scale, cap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    CAPPED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, BLOCK_R)
    bhg = (tl.program_id(0) // tiles).to(tl.int64)
    b, h, g = bhg // groups // heads, bhg // groups % heads, bhg % groups
    # The longest future comes first, so that short programs fill the gaps. A key tile is read once
    # a query head: it is the queries that stream, and no two heads share these.
    begin = tl.program_id(0) % tiles * BLOCK_R
    row = begin + tl.arange(0, BLOCK_R)
    m_row = row < length
    o_d = tl.arange(0, BLOCK_D)
    p_q += b * s_qb + h * s_qh + g * s_qg
    p_k += b * s_kb + h * s_kh
    p_lse += bhg * length
    p_row = p_k + row[:, None].to(tl.int64) * s_kt + o_d[None, :]
    k = tl.load(p_row, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
    earliest, latest, end = length, length, row * 0 + length
    if HAS_DOCUMENTS:
        p_end += b * length
        end = tl.load(p_end + row, mask=m_row, other=0)
        earliest = tl.load(p_end + begin)
        latest = tl.load(p_end + tl.minimum(begin + BLOCK_R, length) - 1)
    top = tl.full([BLOCK_R], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    # From the first query that can count: `edge` masked tiles, `full` ones that count for all rows,
    # `behind` masked ones up to the last document's end.
    begin += delay
    edge = tl.cdiv(BLOCK_R, BLOCK_C)
    whole = begin + edge * BLOCK_C
    full = tl.maximum(earliest - whole, 0) // BLOCK_C
    behind = tl.cdiv(tl.maximum(latest - whole - full * BLOCK_C, 0), BLOCK_C)
    before = tl.minimum(edge, tl.cdiv(tl.maximum(latest - begin, 0), BLOCK_C))
    for i in range(before + behind):
        gap = tl.where(i < before, 0, full * BLOCK_C)
        first = begin + i * BLOCK_C + gap
        top, total = _step(
            top, total, k, p_q, p_lse, row + delay, end, first, length, s_qt, scale, cap,
            D, BLOCK_D, BLOCK_C, CAPPED, True,
        )  # fmt: skip
    for i in range(full):
        first = whole + i * BLOCK_C
        top, total = _step(
            top, total, k, p_q, p_lse, row + delay, end, first, length, s_qt, scale, cap,
            D, BLOCK_D, BLOCK_C, CAPPED, False,
        )  # fmt: skip
    tl.store(p_out + bhg * length + row, natural(top, total), mask=m_row)
