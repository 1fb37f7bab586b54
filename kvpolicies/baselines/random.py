"""random: the control that every study needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.policy import Policy, Scores, View, whole


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Score = a seeded random number per (sequence, layer, KV head, position): the control."""

    name = "random"
    source = "control"
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self.seed, 0, "random: seed")

    def scores(self, view: View) -> Scores:
        """A hash, not a generator: the number belongs to the token, in any batch and order."""
        device = view.positions.device
        rows = torch.tensor(view.seeds, device=device)[:, None, None]
        heads = torch.arange(view.positions.shape[1], device=device)[None, :, None]
        x = _mix(rows + 1_000_003 * self.seed)
        x = _mix(x + 65_537 * view.layer + heads)
        x = _mix(x + view.positions.long())
        return (x & 0xFFFFFF).float() / (1 << 24)


def _mix(x: Tensor) -> Tensor:
    """One round of a 64-bit integer hash (Murmur3's finaliser, shifts kept non-negative)."""
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x00AE502812AA7333
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x3B314601E57A13AD
    return x ^ ((x >> 33) & 0x7FFFFFFF)
