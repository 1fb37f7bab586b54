"""Farthest-point sampling of queries by cosine (BeaconKV, Section "Farthest point sampling").

On Triton one launch does all heads of all rows, a program a head. Up to 64 queries, a full buffer,
their cosines are made once and stay in registers; more, a prompt's, are read again for each choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicies.kernels.backend import DTYPES, use_triton
from kvpolicies.kernels.jit import jit, power_of_2, tl

FEW = 64
# (numbers a tile, warps) of the program for few, and for many.
TILE_FEW, TILE_MANY = (2048, 8), (4096, 8)
LARGEST = 4096  # numbers a query; beyond, torch
EPS = 1e-12


def farthest_points(queries: Tensor, m: int) -> Tensor:
    """Chooses `m` mutually distant queries.

    First the query whose mean cosine to all is lowest (its cosine to their sum: O(N)), then m - 1
    times the query whose highest cosine to the chosen ones is lowest. Ties: the smaller index.

    Args:
        queries: [..., N, D]; N >= m >= 1. Scored in float32 on L2-normalised queries.
        m: how many to choose.

    Returns:
        [..., m] int64 indices into N, in the order of choice; distinct.
    """
    wanted = torch.is_grad_enabled() and queries.requires_grad
    fits = queries.dtype in DTYPES and queries.shape[-1] <= LARGEST and not wanted
    return (_triton if use_triton(queries) and fits else _reference)(queries, m)


def _reference(queries: Tensor, m: int) -> Tensor:
    unit = torch.nn.functional.normalize(queries.float(), dim=-1, eps=EPS)
    if unit.shape[-2] <= FEW:
        return _of_cosines(unit @ unit.mT, m)
    total = unit.sum(dim=-2, keepdim=True)
    chosen = [(unit * total).sum(-1).argmin(dim=-1)]
    highest = torch.full(unit.shape[:-1], float("-inf"), device=unit.device)
    for _ in range(m - 1):
        last = chosen[-1][..., None]
        point = unit.gather(-2, last[..., None].expand(*last.shape, unit.shape[-1]))
        highest = torch.maximum(highest, (unit * point).sum(-1))
        # A chosen query never comes again, not even among exact copies of itself.
        highest.scatter_(-1, last, float("inf"))
        chosen.append(highest.argmin(dim=-1))
    return torch.stack(chosen, dim=-1)


def _of_cosines(cosines: Tensor, m: int) -> Tensor:
    """The choice by the cosines [..., N, N] of few queries, which are made once."""
    chosen = [cosines.sum(-1).argmin(dim=-1)]
    highest = torch.full(cosines.shape[:-1], float("-inf"), device=cosines.device)
    for _ in range(m - 1):
        last = chosen[-1][..., None]
        rows = cosines.gather(-2, last[..., None].expand(*last.shape, cosines.shape[-1]))
        highest = torch.maximum(highest, rows[..., 0, :])
        highest.scatter_(-1, last, float("inf"))
        chosen.append(highest.argmin(dim=-1))
    return torch.stack(chosen, dim=-1)


def _triton(queries: Tensor, m: int) -> Tensor:
    *heads, n, d = queries.shape
    queries = queries.contiguous()
    out = queries.new_empty(*heads, m, dtype=torch.int64)
    programs = (queries.numel() // (n * d),)
    if n <= FEW:
        block_n = power_of_2(n, 16)
        block_d = min(power_of_2(d, 16), max(16, TILE_FEW[0] // block_n))
        sizes = {"BLOCK_N": block_n, "BLOCK_D": block_d, "EPS": EPS, "num_warps": TILE_FEW[1]}
        _few_kernel[programs](queries, out, n, m, d, **sizes)
        return out
    block_d = power_of_2(d, 16)
    sizes = {"BLOCK_N": max(2, TILE_MANY[0] // block_d), "BLOCK_D": block_d, "EPS": EPS}
    highest = queries.new_empty(*heads, n, dtype=torch.float32)
    _many_kernel[programs](queries, highest, out, n, m, d, **sizes, num_warps=TILE_MANY[1])
    return out


@jit
def _lowest_first(cosine):
    """What is not a number counts as lowest, so that an index is always one of the N."""
    return tl.where(cosine == cosine, cosine, float("-inf"))


@jit(varying=("n",))
def _few_kernel(
    p_q,  # [heads, N, D]
    p_out,  # [heads, m] int64
    n, m, d,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    p_q += head * n * d + o_n[:, None] * d + o_d[None, :]
    square = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, d, BLOCK_D):
        inside = (o_n < n)[:, None] & (first + o_d < d)[None, :]
        x = tl.load(p_q + first, mask=inside, other=0.0).to(tl.float32)
        square += tl.sum(x * x, axis=1)
    norm = tl.maximum(tl.sqrt(square), EPS)
    cosines = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for first in range(0, d, BLOCK_D):
        inside = (o_n < n)[:, None] & (first + o_d < d)[None, :]
        unit = tl.load(p_q + first, mask=inside, other=0.0).to(tl.float32) / norm[:, None]
        cosines += tl.dot(unit, tl.trans(unit), input_precision="ieee")
    cosines = _lowest_first(cosines)
    last = tl.argmin(tl.where(o_n < n, tl.sum(cosines, axis=1), float("inf")), axis=0)
    tl.store(p_out + head * m, last)
    highest = tl.where(o_n < n, float("-inf"), float("inf"))
    for i in range(1, m):
        its = tl.sum(tl.where(o_n[None, :] == last, cosines, 0.0), axis=1)
        highest = tl.where(o_n == last, float("inf"), tl.maximum(highest, its))
        last = tl.argmin(highest, axis=0)
        tl.store(p_out + head * m + i, last)


@jit
def _units(p_q, row, n, d, BLOCK_D: tl.constexpr, EPS: tl.constexpr):
    """Queries `row` [R] as unit vectors [R, D]; zeros where there is none."""
    o_d = tl.arange(0, BLOCK_D)
    inside = (row < n)[:, None] & (o_d < d)[None, :]
    x = tl.load(p_q + row[:, None] * d + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), EPS)[:, None]


@jit(varying=("n",))
def _many_kernel(
    p_q,  # [heads, N, D]
    p_highest,  # [heads, N]: of each query, the highest cosine to those chosen
    p_out,  # [heads, m] int64
    n, m, d,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    p_q += head * n * d
    p_highest += head * n
    point = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, n, BLOCK_N):
        point += tl.sum(_units(p_q, first + o_n, n, d, BLOCK_D, EPS), axis=0)
    last = -1
    for i in range(m):
        best, where = float("inf"), 0
        for first in range(0, n, BLOCK_N):
            row = first + o_n
            its = tl.sum(_units(p_q, row, n, d, BLOCK_D, EPS) * point[None, :], axis=1)
            highest = _lowest_first(its)
            if i > 0:
                if i > 1:
                    before = tl.load(p_highest + row, mask=row < n, other=0.0)
                    highest = tl.maximum(before, highest)
                highest = tl.where(row == last, float("inf"), highest)
                tl.store(p_highest + row, highest, mask=row < n)
            highest = tl.where(row < n, highest, float("inf"))
            lowest = tl.min(highest, axis=0)
            # Strictly lower: of equal ones the smaller index, here and within the tile.
            where = tl.where(lowest < best, first + tl.argmin(highest, axis=0), where)
            best = tl.minimum(best, lowest)
        tl.debug_barrier()  # the next choice reads what other threads wrote
        last = where
        tl.store(p_out + head * m + i, last)  # pyright: ignore[reportAttributeAccessIssue]
        chosen = tl.zeros([BLOCK_N], tl.int32) + last
        point = tl.max(_units(p_q, chosen, n, d, BLOCK_D, EPS), axis=0)


def sampled(queries: Tensor, m: int) -> Tensor:
    """The `m` queries [..., m, D] that `farthest_points` chooses from [..., N, D], in its order."""
    index = farthest_points(queries, m)
    return queries.gather(-2, index[..., None].expand(*index.shape, queries.shape[-1]))
