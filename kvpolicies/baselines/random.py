"""random: the control that every study needs."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvpolicies.draws import mix, of_heads
from kvpolicies.options import option
from kvpolicies.policy import Observation, Policy, Scores, View


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Score = a seeded random number per (sequence, layer, KV head, position): the control.

    Raises:
        UserError: for a seed below 0.
    """

    name = "random"
    source = "control"
    slot_tensors = MappingProxyType({"drawn": torch.float32})
    seed: int = option(0, least=0)
    """Another seed draws other numbers; 0 or more."""

    def observe(self, view: View, step: Observation) -> None:
        """Draws each new token's number.

        A hash, not a generator: the number belongs to the token, in any batch and order.
        """
        x = mix(of_heads(view, self.seed)[:, :, None] + step.positions[:, None])  # [B, H, n]
        slots = view.newest_slots(step.positions.shape[1])[:, None].expand(x.shape)
        view.slot_state["drawn"].scatter_(2, slots, (x & 0xFFFFFF).float() / (1 << 24))

    def scores(self, view: View) -> Scores:
        """The numbers drawn."""
        return view.slot_state["drawn"]
