"""Attention masks from eviction times, for training under a student's own evictions.

Query q sees key t of its document iff t <= q < expires[t]. `dense_mask` is S x S, for SDPA and
short sequences (torch's FlexAttention has no backward on a CPU); `block_mask` needs the extremes of
`expires` in blocks only, O((S / block)^2), and gives exactly the blocks that torch's
`create_block_mask` finds by trying every pair.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from kvpolicies.errors import UserError

BLOCK = 128


def dense_mask(expires: Tensor, documents: Tensor | None = None) -> Tensor:
    """Who sees whom.

    Args:
        expires: [B, H, S] int32, index of the first query that no longer sees the token.
        documents: [B, S] integer, nondecreasing along a row; None = one.

    Returns:
        [B, H, S, S] bool, True where query (third axis) sees key (last axis).
    """
    at = torch.arange(expires.shape[-1], device=expires.device)
    seen = (at[None, :] <= at[:, None]) & (at[:, None] < expires[..., None, :])
    if documents is None:
        return seen
    return seen & (documents[:, :, None] == documents[:, None, :])[:, None]


def block_mask(
    expires: Tensor, documents: Tensor | None = None, groups: int = 1, block: int = BLOCK
) -> BlockMask:
    """The mask for FlexAttention, without S x S.

    Args:
        expires: as in `dense_mask`.
        documents: as in `dense_mask`.
        groups: query heads per KV head; FlexAttention asks for masks by query head.
        block: tokens a side of a block.

    Returns:
        BlockMask of B rows and H * groups heads; full blocks apart from partial ones.

    Raises:
        ValueError: unless `expires` is [B, H, S] and `documents`, if any, [B, S].
    """
    if expires.dim() != 3 or expires.shape[-1] < 1:
        raise UserError(f"block mask: expires must be [B, H, S], got {list(expires.shape)}")
    b, s = expires.shape[0], expires.shape[-1]
    if documents is not None and documents.shape != (b, s):
        got = list(documents.shape)
        raise UserError(f"block mask: documents must be [B, S] = [{b}, {s}], got {got}")

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = (kv <= q) & (q < expires[b, h // groups, kv])
        return seen if documents is None else seen & (documents[b, q] == documents[b, kv])

    some, full = (x.repeat_interleave(groups, dim=1) for x in _blocks(expires, documents, block))
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~full),
        *_ordered(full),
        BLOCK_SIZE=block,
        mask_mod=visible,
        seq_lengths=(s, s),
    )


def _blocks(expires: Tensor, documents: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """(some pair is visible, every pair is), each [B, H, n, n] bool: query blocks, then key blocks.

    Where keys' block lies before queries', all t <= q: the first query sees the most, the last the
    least. What both blocks share of documents is at most one, the last of the keys', which is the
    first of the queries'. Each token sees itself unless it never was in the cache.
    """
    s = expires.shape[-1]
    n = -(-s // block)
    padding = (0, n * block - s)
    # Behind the end: tokens that nobody sees, and that are queries of no full block.
    times = torch.nn.functional.pad(expires, padding, value=0).unflatten(-1, (n, block))
    at = torch.arange(n * block, device=expires.device).view(n, block)
    itself = (times > at).any(dim=-1)
    least, most = times.amin(dim=-1), times.amax(dim=-1)
    before = at[:, :1] > at[None, :, 0]
    some, full = before, before & (at[:, -1:] < s)
    if documents is not None:
        its = documents[:, None, at.clamp_max(s - 1)]  # [B, 1, n, block]
        newest = torch.where(its == its[..., -1:], times, 0)
        most = newest.amax(dim=-1)
        some = some & (its[..., :, None, 0] == its[..., None, :, -1])
        full = full & (its[..., :, None, -1] == its[..., None, :, 0])
    some = some & (most[..., None, :] > at[:, :1])
    full = full & (least[..., None, :] > at[:, -1:])
    return some | torch.diag_embed(itself), full.expand_as(some)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, n, n] bool -> how many in each row, and their columns first; int32."""
    columns = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), columns.to(torch.int32)
