"""Which slots go: protection, exact ties, and the choice itself, the same for every policy."""

import torch
from torch import Tensor

LAST = torch.iinfo(torch.int32).max


def choose_victims(
    scores: Tensor, positions: Tensor, newest: Tensor, sinks: int, window: int, n_drop: int
) -> Tensor:
    """The `n_drop` lowest-scored unprotected slots of each head; Y = layers.

    Protected are positions < `sinks` and the `window` newest ones. Of equal scores the larger
    position stays: decided exactly, by sorting on (score, position) as one integer.

    Args:
        scores: [Y, B, H, L] (or [B, H, L]) float32, higher stays.
        positions: as scores, int32, distinct within a head.
        newest: [B] position of the last processed token.

    Returns:
        [Y, B, H, n_drop] int64 slots, in no particular order.
    """
    protected = (positions < sinks) | (positions > newest[:, None, None] - window)
    if n_drop == 1:
        scores = scores.float().masked_fill(protected, torch.inf)
        stays = (scores != scores.amin(dim=-1, keepdim=True)) | protected
        return positions.masked_fill(stays, LAST).argmin(dim=-1, keepdim=True)
    # + 0.0 turns -0.0 into 0.0, which must tie with it.
    key = (sortable(scores.float() + 0.0).long() << 32) | positions.long()
    key = key.masked_fill(protected, torch.iinfo(torch.int64).max)
    return key.topk(n_drop, dim=-1, largest=False, sorted=False).indices


def sortable(x: Tensor) -> Tensor:
    """float32 -> int32 in the same order (NaN aside)."""
    bits = x.contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def highest(scores: Tensor, positions: Tensor, n: Tensor) -> Tensor:
    """[B, H, L] bool: the n [B] highest scores of each head, of equal ones the larger positions.

    Slots that must not be among them score -inf; there are at least n others.
    """
    key = (sortable(scores.float() + 0.0).long() << 32) | positions.long()
    ordered = key.sort(dim=-1, descending=True).values
    last = (n - 1).clamp_min(0)[:, None, None].expand(*scores.shape[:2], 1)
    return (key >= ordered.gather(-1, last)) & (n > 0)[:, None, None]
