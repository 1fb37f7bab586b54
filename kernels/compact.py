"""Hole-filling compaction: evicted slots are refilled from the tail, in place.

With L filled slots of which n are evicted, the survivors among the last n slots move into the
holes below L - n. At most n slots move, whatever L is, and no second copy of the cache exists.
On Triton: one launch for the plan, one a tensor for the moves. Sources lie in the tail and holes
before it, so moves never meet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicies.kernels.backend import use_triton
from kvpolicies.kernels.jit import ceil_div, jit, power_of_2, tl

# Victims and tail slots a tile of the plan; numbers a tile of the moves.
PLAN, MOVE = 32, 2048


def plan_moves(victims: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Where each survivor of the tail goes.

    Args:
        victims: [..., n] int64, distinct slots < `length` to give up, in any order.
        length: L, the filled slots of every head before the eviction.

    Returns:
        (source, destination), each [..., n] int64. Beyond the slots that really move, source and
        destination are equal, so that the copy has one fixed shape for every head.
    """
    return (_triton_plan if use_triton(victims) else _reference_plan)(victims, length)


def _reference_plan(victims: Tensor, length: int) -> tuple[Tensor, Tensor]:
    n = victims.shape[-1]
    if n == 1:  # one in, one out: the last slot fills the hole
        return torch.full_like(victims, length - 1), victims
    destination = victims.sort(dim=-1).values
    tail = torch.zeros(*victims.shape[:-1], n, dtype=torch.bool, device=victims.device)
    in_tail = destination >= length - n
    # Evicted tail slots are marked; the others of the tail survive and must move.
    tail.scatter_(-1, (destination - (length - n)).clamp_min(0), in_tail)
    # Survivors first, then evicted tail slots, both ascending: the latter pair with themselves,
    # for they are also the last of the sorted destinations.
    order = tail.to(torch.uint8).argsort(dim=-1, stable=True)
    return order + (length - n), destination


def compact(tensors: list[Tensor], victims: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Removes `victims` from every tensor in place; survivors end up in slots [0, length - n).

    Args:
        tensors: slot-aligned tensors [B, H, C, D] or [B, H, C], C >= `length`; or these of several
            layers, [Y, B, H, C, D] and [Y, B, H, C].
        victims: [B, H, n] or [Y, B, H, n] int64, distinct slots < `length`.
        length: L, filled slots before the eviction.

    Returns:
        the (source, destination) of `plan_moves`, for callers that count moved data.
    """
    source, destination = plan_moves(victims, length)
    move = _triton_move if use_triton(victims) else _reference_move
    for tensor in tensors:
        move(tensor, source, destination)
    return source, destination


def _reference_move(tensor: Tensor, source: Tensor, destination: Tensor) -> None:
    slots = source.dim() - 1
    if tensor.dim() > source.dim():
        shape = (*source.shape, tensor.shape[-1])
        source, destination = source[..., None].expand(shape), destination[..., None].expand(shape)
    tensor.scatter_(slots, destination, tensor.gather(slots, source))


def _triton_plan(victims: Tensor, length: int) -> tuple[Tensor, Tensor]:
    n = victims.shape[-1]
    if n == 1:
        return torch.full_like(victims, length - 1), victims
    victims = victims.contiguous()
    source, destination = torch.empty_like(victims), torch.empty_like(victims)
    block = min(PLAN, power_of_2(n))
    heads = victims.numel() // n
    _plan_kernel[heads, ceil_div(n, block)](victims, source, destination, n, length, BLOCK=block)
    return source, destination


def _triton_move(tensor: Tensor, source: Tensor, destination: Tensor) -> None:
    if source.dim() == 3:
        tensor, source, destination = tensor[None], source[None], destination[None]
    y, b, h, n = source.shape
    width = 1 if tensor.dim() == 4 else tensor.shape[4]
    assert tensor.dim() == 4 or tensor.stride(4) == 1, "a slot's numbers lie together"
    block_w = power_of_2(width)
    block = min(power_of_2(n), max(1, MOVE // block_w))
    _move_kernel[y * b * h, ceil_div(n, block)](
        *(tensor, source.contiguous(), destination.contiguous(), *tensor.stride()[:4]),
        *(b, h, n, width),
        BLOCK=block,
        BLOCK_W=block_w,
    )


@jit(varying=("length", "n"))
def _plan_kernel(
    p_victim, p_source, p_destination,  # [..., n] int64
    n, length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A pair's place is its rank, by counting: n is small, and no sort across programs is needed.

    Victims, ascending, are the destinations. A victim in the tail is its own source, at its rank
    among all victims; a survivor of the tail goes to its rank among these.
    """
    base = tl.program_id(0).to(tl.int64) * n
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = own < n
    victim = tl.load(p_victim + base + own, mask=exists, other=0)
    tail = length - n + own  # the tail's slots, one a lane
    lower = tl.zeros([BLOCK], tl.int32)  # victims below this one
    gone_before = tl.zeros([BLOCK], tl.int32)  # victims in the tail before this slot
    gone = tl.zeros([BLOCK], tl.int32)
    for first in range(0, n, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        other = tl.load(p_victim + base + o_n, mask=o_n < n, other=-1)
        real = (o_n < n)[None, :]
        lower += tl.sum((real & (other[None, :] < victim[:, None])).to(tl.int32), axis=1)
        inside = other[None, :] >= length - n
        gone_before += tl.sum((inside & (other[None, :] < tail[:, None])).to(tl.int32), axis=1)
        gone += tl.sum((other[None, :] == tail[:, None]).to(tl.int32), axis=1)
    tl.store(p_destination + base + lower, victim, mask=exists)
    tl.store(p_source + base + lower, victim, mask=exists & (victim >= length - n))
    survives = exists & (gone == 0)
    tl.store(p_source + base + own - gone_before, tail.to(tl.int64), mask=survives)


@jit(varying=("n",))
def _move_kernel(
    p_x,  # [Y, B, H, C, width]
    p_source, p_destination,  # [Y, B, H, n] int64
    s_y, s_b, s_h, s_c,
    rows, heads, n, width,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    ybh = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(p_source + ybh * n + o_n, mask=o_n < n, other=0)
    destination = tl.load(p_destination + ybh * n + o_n, mask=o_n < n, other=0)
    o_w = tl.arange(0, BLOCK_W)
    moves = (source != destination)[:, None] & (o_w < width)[None, :]
    yb = ybh // heads
    p_x += yb // rows * s_y + yb % rows * s_b + ybh % heads * s_h
    x = tl.load(p_x + source[:, None] * s_c + o_w[None, :], mask=moves)
    tl.store(p_x + destination[:, None] * s_c + o_w[None, :], x, mask=moves)
