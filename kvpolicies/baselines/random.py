"""random: the control that every study needs."""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kvpolicies.policy import Observation, Policy, Scores, View, whole
from kvpolicies.transfer import on_device


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Score = a seeded random number per (sequence, layer, KV head, position): the control.

    Raises:
        UserError: for a seed below 0.
    """

    name = "random"
    source = "control"
    slot_tensors = MappingProxyType({"drawn": torch.float32})
    seed: int = 0
    """Another seed draws other numbers; 0 or more."""

    def __post_init__(self) -> None:
        whole(self.seed, 0, "random: seed")

    def observe(self, view: View, step: Observation) -> None:
        """Draws each new token's number.

        A hash, not a generator: the number belongs to the token, in any batch and order.
        """
        rows, heads = on_device(view.seeds, view.keys.device), view.positions.shape[1]
        x = _mix(rows + 1_000_003 * self.seed % (1 << 63))[:, None]
        head = view.geometry.first_head + torch.arange(heads, device=x.device)
        x = _mix(x + 65_537 * view.layer + head)
        x = _mix(x[:, :, None] + step.positions[:, None])  # [B, H, n]
        slots = view.newest_slots(step.positions.shape[1])[:, None].expand(x.shape)
        view.slot_state["drawn"].scatter_(2, slots, (x & 0xFFFFFF).float() / (1 << 24))

    def scores(self, view: View) -> Scores:
        """The numbers drawn."""
        return view.slot_state["drawn"]


def _mix(x: Tensor) -> Tensor:
    """One round of a 64-bit integer hash (Murmur3's finaliser, shifts kept non-negative)."""
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x00AE502812AA7333
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x3B314601E57A13AD
    return x ^ ((x >> 33) & 0x7FFFFFFF)
