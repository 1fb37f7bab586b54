"""Which token leaves a full cache, and when, for static priorities: all queries in one pass.

A priority is given once and kept, so a token that fell out of the top k never comes back, and the
k-th best of those eligible so far decides everything: the reference holds it as the root of a heap
of k ranks, O(S log k). On Triton a program a row holds counts of ranks in a Fenwick tree (Fenwick
1994) and finds the k-th by binary lifting, O(S log S) (KVpop, arXiv 2607.05061); nothing is ever
taken out of the tree. What follows from it, eviction times, is plain torch in both forms.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from kvpolicies.kernels.backend import use_triton
from kvpolicies.kernels.jit import jit, tl

NEVER = torch.iinfo(torch.int32).max


def retain(
    priorities: Tensor, sinks: int, window: int, topk: int, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The incumbent at risk at each query, and each token's eviction time.

    Positions count from 0 in each document. At query q token q - window enters, unless it is a
    sink. Once `topk` tokens entered before it, one of them or the new one goes: that of the lowest
    priority, of equal ones the smaller position. This is evict-then-attend: query q sees at most
    sinks + topk + window tokens, itself among them. A cache that evicts after it attended, as
    ours do, is the same with window + 1 and topk - 1.

    Args:
        priorities: [R, S] float, higher stays. A decay with age is part of it: r_t + lambda * t.
        sinks: first tokens of a document, which never leave.
        window: newest tokens, which cannot leave yet.
        topk: tokens that a row holds beside these, at least 1.
        documents: [R, S] integer (or what expands to it), nondecreasing along a row; documents
            know nothing of each other. None: each row is one.

    Returns:
        (boundary, expires), each [R, S] int32.
        boundary[q]: index in the row of the topk-th best token that entered before query q, which
        leaves unless the new one does; -1 where nothing has to leave.
        expires[t]: index of the first query that no longer sees token t; NEVER if there is none.

    Raises:
        ValueError: for NaN, negative sizes, topk < 1, or documents that decrease or do not fit.
    """
    priorities = priorities.detach()
    _check(priorities, sinks, window, topk)
    r, s = priorities.shape
    first, last = document_bounds(priorities, documents)
    # + 0.0 turns -0.0 into 0.0, which must tie with it.
    order = (priorities + 0.0).sort(dim=-1, stable=True).indices
    if documents is not None:
        # `first` tells documents apart, and sorted by it each keeps its own stretch of the row.
        order = order.gather(1, first.gather(1, order).sort(dim=-1, stable=True).indices)
    columns = torch.arange(s, device=priorities.device).expand(r, s)
    rank = torch.empty_like(order).scatter_(1, order, columns)
    form = _triton if use_triton(priorities) and priorities.numel() else _reference
    kth = form(rank.int(), last, sinks, window, topk).long()
    full = kth >= 0
    # Where nothing leaves, all is read at index 0 and written to a column that is dropped.
    kth = kth.clamp_min(0)
    boundary = order.gather(1, kth).int().masked_fill(~full, -1)
    leaves = torch.minimum(kth, rank.gather(1, (columns - window).clamp_min(0)))
    leaves = order.gather(1, leaves).masked_fill(~full, s)
    expires = torch.full((r, s + 1), NEVER, dtype=torch.int32, device=priorities.device)
    return boundary, expires.scatter_(1, leaves, columns.int())[:, :s].contiguous()


def document_bounds(like: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each token's document begins and ends.

    Args:
        like: [..., S], any tensor of the shape and device wanted.
        documents: integer, expands to that shape, nondecreasing along the last axis; None: one.

    Returns:
        (first, last), each of that shape, int32: index of its first token, and of its last one + 1.

    Raises:
        ValueError: if documents decrease, or do not expand to that shape.
    """
    shape, s = like.shape, like.shape[-1]
    if documents is None:
        at = torch.zeros(s, dtype=torch.int32, device=like.device)
        return at.expand(shape), torch.full_like(at, s).expand(shape)
    fits = documents.dim() <= len(shape) and all(
        a in (1, b) for a, b in zip(documents.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"documents {list(documents.shape)} do not fit rows {list(shape)}")
    if bool((documents.diff(dim=-1) < 0).any()):
        raise ValueError("documents must not decrease along a row: sort the pieces by document")
    documents = documents.to(like.device).expand(*documents.shape[:-1], s).contiguous()
    first = torch.searchsorted(documents, documents, out_int32=True)
    last = torch.searchsorted(documents, documents, out_int32=True, right=True)
    return first.expand(shape), last.expand(shape)


def _check(priorities: Tensor, sinks: int, window: int, topk: int) -> None:
    if priorities.dim() != 2 or not priorities.is_floating_point():
        got = f"{list(priorities.shape)} {priorities.dtype}"
        raise ValueError(f"priorities must be [rows, tokens] of a float type, got {got}")
    if sinks < 0 or window < 0 or topk < 1:
        got = f"{sinks}, {window}, {topk}"
        raise ValueError(f"sinks and window must be >= 0 and topk >= 1, got {got}")
    if bool(priorities.isnan().any()):
        row, token = priorities.isnan().nonzero()[0].tolist()
        raise ValueError(f"priority of token {token} in row {row} is not a number: it has no rank")


def _reference(rank: Tensor, last: Tensor, sinks: int, window: int, topk: int) -> Tensor:
    """[R, S] int32, at each query the rank of the topk-th best that entered before; -1: too few."""
    s = rank.shape[1]
    found = []
    for ranks, ends in zip(rank.tolist(), last.tolist(), strict=True):
        kth = [-1] * s
        start = 0
        while start < s:
            end = ends[start]
            full = start + sinks + topk
            if full < end - window:
                heap = ranks[start + sinks : full]
                heapq.heapify(heap)
                for t in range(full, end - window):
                    kth[t + window] = heap[0]
                    heapq.heappushpop(heap, ranks[t])
            start = end
        found.append(kth)
    return torch.tensor(found, dtype=torch.int32, device=rank.device).view(rank.shape)


def _triton(rank: Tensor, last: Tensor, sinks: int, window: int, topk: int) -> Tensor:
    r, s = rank.shape
    tree = torch.zeros_like(rank)
    kth = torch.full_like(rank, -1)
    sizes = (s, sinks, window, topk, s.bit_length())
    _fenwick_kernel[r,](rank, last.contiguous(), tree, kth, *sizes, LANES=32, num_warps=1)
    return kth


@jit(varying=("length", "sinks", "window", "topk", "levels"))
def _fenwick_kernel(
    p_rank,  # [R, S] int32: place in the row sorted by (document, priority, position)
    p_last,  # [R, S] int32: where a token's document ends
    p_tree,  # [R, S] int32, zeros: each document's tree lies where its tokens lie
    p_kth,  # [R, S] int32, -1
    length, sinks, window, topk, levels,
    LANES: tl.constexpr,
):  # fmt: skip
    """Node i = 1.. of a document's tree counts ranks i - lowbit(i) <= rank < i that entered.

    A token's nodes are known from its rank alone, one of each level at most: a lane a level adds
    them at once. The search goes down level by level, each step by the count before.
    """
    row = tl.program_id(0).to(tl.int64) * length
    p_rank += row
    p_last += row
    p_kth += row
    level = tl.arange(0, LANES)
    first = length * 0
    while first < length:
        last = tl.load(p_last + first)
        size = last - first
        p_node = p_tree + row + first - 1
        for t in range(first + sinks, last - window):
            own = tl.load(p_rank + t) - first
            # Of so many entered before, the topk-th best is the wanted-th lowest.
            wanted = t - first - sinks - topk + 1
            if wanted > 0:
                below, step = size * 0, (size * 0 + 1) << (levels - 1)
                for _ in range(levels):
                    node = below + step
                    count = tl.load(p_node + node, mask=node <= size, other=length)
                    down = count < wanted
                    below = tl.where(down, node, below)
                    wanted = tl.where(down, wanted - count, wanted)
                    step = step >> 1
                tl.store(p_kth + t + window, first + below)
            tl.debug_barrier()  # lanes still read what others write next
            block = own >> level
            node = (block + 1) << level
            # The last level's shift may overflow; a right half is part of the node above it.
            counts = (block % 2 == 0) & (node > 0) & (node <= size)
            count = tl.load(p_node + node, mask=counts, other=0)
            tl.store(p_node + node, count + 1, mask=counts)
            tl.debug_barrier()  # the next search reads what other lanes wrote
        first = last
