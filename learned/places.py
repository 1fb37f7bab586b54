"""Where tokens lie among a head's slots, which hold them in no order and each head in its own."""

import torch
from torch import Tensor


class Places:
    """The slots of n tokens with consecutive positions, by head.

    Args:
        held: [B, H, L] int32, positions of the slots; -1 = empty.
        wanted: [B, n] positions, each one more than the one before. One below 0 is nowhere; the
            others every head must hold.
    """

    def __init__(self, held: Tensor, wanted: Tensor):
        self.n = wanted.shape[1]
        if self.n == 1:
            nowhere = wanted.masked_fill(wanted < 0, -2)
            self.found = held == nowhere[:, None].to(held.dtype)  # [B, H, L]
        else:
            self.rank = held - wanted[:, None, :1].to(held.dtype)
            self.found = (self.rank >= 0) & (self.rank < self.n) & (held >= 0)

    def slots(self) -> Tensor:
        """[B, H, n] int64; any slot for a token that is nowhere."""
        if self.n == 1:
            return self.found.to(torch.uint8).argmax(dim=-1, keepdim=True)
        b, h, length = self.found.shape
        # The others are all thrown into one place more.
        rank = torch.where(self.found, self.rank, self.n).long()
        own = torch.arange(length, device=rank.device).expand(rank.shape)
        return rank.new_zeros(b, h, self.n + 1).scatter_(2, rank, own)[..., : self.n]

    def write(self, stored: Tensor, values: Tensor) -> None:
        """Puts values [B, H, n] into the tokens' slots of stored [B, H, L]."""
        if self.n > 1:
            values = values.gather(2, self.rank.clamp(0, self.n - 1).long())
        stored.copy_(torch.where(self.found, values, stored))


def taken(stored: Tensor, slots: Tensor) -> Tensor:
    """What lies in the slots [B, H, n] of stored [B, H, L, D]: [B, H, n, D]."""
    return stored.gather(2, slots[..., None].expand(*slots.shape, stored.shape[-1]))
