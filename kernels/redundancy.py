"""R-KV's redundancy of cached keys, without an L x L matrix (arXiv 2505.24133, Section 3).

The Triton form makes every tile of cosines beta + 1 times: beta times to find, row by row, the
position from which on similar neighbours are zeroed, once more to sum columns. No atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicies.kernels.backend import suits
from kvpolicies.kernels.jit import ceil_div, dense, jit, power_of_2, tl
from kvpolicies.kernels.tiles import product

BLOCK = 256
EPS = 1e-8
# (bytes a number of keys, D padded) -> (keys a side of a tile, warps).
BLOCKS = {
    (2, 64): (64, 4),
    (2, 128): (64, 4),
    (2, 256): (32, 4),
    (4, 64): (16, 4),
    (4, 128): (16, 4),
    (4, 256): (16, 4),
}


def key_redundancy(
    keys: Tensor, positions: Tensor, beta: int = 1, threshold: float = 0.5
) -> Tensor:
    """How much each key repeats the others of its head.

    The cosine of all pairs of keys, diagonal zero; in each row the entries of its `beta` most
    recent neighbours with a cosine above `threshold` are zeroed (so that of many copies the newest
    counts as new); mean over rows; softmax over tokens.

    Args:
        keys: [B, H, L, D].
        positions: [B, H, L] integer, distinct within a head; "recent" is by position, not slot.

    Returns:
        [B, H, L] float32, sums to one over L. Memory O(BLOCK * L) a head.
    """
    form = _triton if suits(keys) else _reference
    return (form(keys, positions, beta, threshold) / keys.shape[2]).softmax(dim=-1)


def _reference(keys: Tensor, positions: Tensor, beta: int, threshold: float) -> Tensor:
    """[B, H, L] float32, sums over rows.

    A row's sum over all columns is one product with the sum of all keys; only what is zeroed has to
    be looked for, pair by pair. In position order the most recent neighbour is the last one.
    """
    order = positions.argsort(dim=-1)
    keys = keys.gather(2, order[..., None].expand(keys.shape))
    unit = torch.nn.functional.normalize(keys.float(), dim=-1, eps=EPS)
    total = (unit @ unit.sum(dim=2, keepdim=True).mT)[..., 0] - unit.square().sum(dim=-1)
    for newest in _newest_similar(unit, min(beta, unit.shape[2]), threshold):
        where = newest.clamp_min(0)
        neighbour = unit.gather(2, where[..., None].expand(unit.shape))
        zeroed = (unit * neighbour).sum(dim=-1).masked_fill(newest < 0, 0.0)
        total.scatter_add_(-1, where, -zeroed)
    return torch.empty_like(total).scatter_(-1, order, total)


def _newest_similar(unit: Tensor, beta: int, threshold: float) -> Tensor:
    """[beta, B, H, L] int64: each key's newest, second newest ... similar other; -1 = no more.

    Args:
        unit: [B, H, L, D] float32, of length 1, in order of position.
    """
    b, h, length, _ = unit.shape
    found = unit.new_empty(beta, b * h, length)
    # Counted from 1, so that 0 says no; a float32 counts exactly to 16 million.
    place = torch.arange(1, length + 1, dtype=torch.float32, device=unit.device)
    # One tile of one head is all that is held, in memory that stays in a CPU's cache.
    held = unit.new_empty(min(BLOCK, length), length)
    for head, keys in enumerate(unit.flatten(0, 1)):
        for start in range(0, length, BLOCK):
            tile = keys[start : start + BLOCK]
            cosine = torch.mm(tile, keys.T, out=held[: len(tile)])
            cosine.diagonal(offset=start).zero_()
            similar = cosine.gt_(threshold).mul_(place)
            for k in range(beta):
                newest = similar.amax(dim=-1, keepdim=True)
                found[k, head, start : start + BLOCK] = newest[:, 0]
                if k + 1 < beta:
                    similar.scatter_(-1, newest.long().sub_(1).clamp_min_(0), 0.0)
    return found.view(beta, b, h, length).long() - 1


def _triton(keys: Tensor, positions: Tensor, beta: int, threshold: float) -> Tensor:
    b, h, length, d = keys.shape
    keys, positions = dense(keys), dense(positions)
    norms = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32).clamp_min(EPS)
    block_d = power_of_2(d, 16)
    block, warps = BLOCKS[keys.element_size(), max(64, block_d)]
    # Similar neighbours from this position on are zeroed; beta = 0: none is.
    cut = torch.empty(b, h, length, dtype=torch.int32, device=keys.device)
    total = torch.empty(b, h, length, dtype=torch.float32, device=keys.device)
    grid = (b * h, ceil_div(length, block))
    shared = [keys, norms.contiguous(), positions, cut]
    strides = [*keys.stride()[:3], *positions.stride()[:2]]
    sizes = {"D": d, "BLOCK_D": block_d, "BLOCK": block, "num_warps": warps}
    if beta == 0:
        cut.fill_(torch.iinfo(torch.int32).max)
    else:
        _cut_kernel[grid](*shared, *strides, h, length, min(beta, length), threshold, **sizes)
    _sum_kernel[grid](*shared, total, *strides, h, length, threshold, **sizes)
    return total


@jit
def _cosines(k_rows, k_columns, n_rows, n_columns, rows, columns):
    """[R, C] of keys [R, D] and [D, C] with their norms; zero where a key meets itself.

    One function for both kernels: a cosine has the same bits in both, above the threshold or not.
    """
    cosines = product(k_rows, k_columns) / n_rows[:, None] / n_columns[None, :]
    return tl.where(rows[:, None] == columns[None, :], 0.0, cosines)


@jit(varying=("length", "beta"))
def _cut_kernel(
    p_k,  # [B, H, L, D]
    p_norm,  # [B, H, L]
    p_at,  # [B, H, L]
    p_cut,  # [B, H, L]: of each row's similar neighbours the beta-th newest position, or -1
    s_kb, s_kh, s_kl, s_ab, s_ah,
    heads, length, beta, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_rows = rows < length
    p_k += b * s_kb + h * s_kh
    p_norm += bh * length
    p_row = p_k + rows[:, None].to(tl.int64) * s_kl + o_d[None, :]
    k_rows = tl.load(p_row, mask=m_rows[:, None] & m_d[None, :], other=0.0)
    n_rows = tl.load(p_norm + rows, mask=m_rows, other=1.0)
    cut = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for _ in range(beta):
        newest = tl.full([BLOCK], -1, tl.int32)
        for first in range(0, length, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            m_columns = columns < length
            p_column = p_k + columns[None, :].to(tl.int64) * s_kl + o_d[:, None]
            k_columns = tl.load(p_column, mask=m_columns[None, :] & m_d[:, None], other=0.0)
            n_columns = tl.load(p_norm + columns, mask=m_columns, other=1.0)
            at = tl.load(p_at + b * s_ab + h * s_ah + columns, mask=m_columns, other=-1)
            at = at.to(tl.int32)
            cosines = _cosines(k_rows, k_columns, n_rows, n_columns, rows, columns)
            similar = (cosines > threshold) & (at[None, :] < cut[:, None])
            newest = tl.maximum(newest, tl.max(tl.where(similar, at[None, :], -1), axis=1))
        cut = newest
    tl.store(p_cut + bh * length + rows, cut, mask=m_rows)


@jit(varying=("length",))
def _sum_kernel(
    p_k, p_norm, p_at, p_cut,  # as above
    p_total,  # [B, H, L]
    s_kb, s_kh, s_kl, s_ab, s_ah,
    heads, length, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_columns = columns < length
    p_k += b * s_kb + h * s_kh
    p_norm += bh * length
    p_column = p_k + columns[None, :].to(tl.int64) * s_kl + o_d[:, None]
    k_columns = tl.load(p_column, mask=m_columns[None, :] & m_d[:, None], other=0.0)
    n_columns = tl.load(p_norm + columns, mask=m_columns, other=1.0)
    at = tl.load(p_at + b * s_ab + h * s_ah + columns, mask=m_columns, other=-1).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        m_rows = rows < length
        p_row = p_k + rows[:, None].to(tl.int64) * s_kl + o_d[None, :]
        k_rows = tl.load(p_row, mask=m_rows[:, None] & m_d[None, :], other=0.0)
        n_rows = tl.load(p_norm + rows, mask=m_rows, other=1.0)
        cut = tl.load(p_cut + bh * length + rows, mask=m_rows, other=0)
        cosines = _cosines(k_rows, k_columns, n_rows, n_columns, rows, columns)
        zeroed = (cosines > threshold) & (at[None, :] >= cut[:, None])
        total += tl.sum(tl.where(zeroed, 0.0, cosines), axis=0)
    tl.store(p_total + bh * length + columns, total, mask=m_columns)
