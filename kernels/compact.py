"""Hole-filling compaction: evicted slots are refilled from the tail, in place.

With L filled slots of which n are evicted, the survivors among the last n slots move into the
holes below L - n. At most n slots move, whatever L is, and no second copy of the cache exists.
"""

import torch
from torch import Tensor


def plan_moves(victims: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Where each survivor of the tail goes.

    Args:
        victims: [B, H, n] int64, distinct slots < `length` to give up, in any order.
        length: L, the filled slots of every head before the eviction.

    Returns:
        (source, destination), each [B, H, n] int64. Beyond the slots that really move, source and
        destination are equal, so that the copy has one fixed shape for every head.
    """
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
        tensors: slot-aligned tensors [B, H, C, ...] or [B, H, C], C >= `length`.
        victims: [B, H, n] int64, distinct slots < `length`.
        length: L, filled slots before the eviction.

    Returns:
        the (source, destination) of `plan_moves`, for callers that count moved data.
    """
    source, destination = plan_moves(victims, length)
    for tensor in tensors:
        shape = (*source.shape, *tensor.shape[3:])
        index = (..., *([None] * (tensor.dim() - 3)))
        moved = tensor.gather(2, source[index].expand(shape))
        tensor.scatter_(2, destination[index].expand(shape), moved)
    return source, destination
