"""tova: attention of the newest query (arXiv 2401.06104)."""

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from kvpolicies.budget import Budget
from kvpolicies.policy import Observation, Policy, Schedule, Scores, View


@dataclass(frozen=True, kw_only=True)
class Tova(Policy):
    """Attention of the newest query, mean over all heads of a layer: one kept set a layer.

    Evicts each step. The paper protects neither sinks nor window: `faithful=True`.
    """

    name = "tova"
    source = "TOVA, arXiv 2401.06104"
    layers_alike = True
    mixes_heads = True
    one_set = True
    needs_attention = True
    slot_tensors = MappingProxyType({"newest_weight": torch.float32})
    faithful: bool = False
    """The paper's rule: neither sinks nor window are protected."""

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True` nothing is protected, as in the paper."""
        common = Schedule.under(budget)
        return replace(common, sinks=0, window=0) if self.faithful else common

    def observe(self, view: View, step: Observation) -> None:
        """Keeps the last query's row, averaged over all query heads."""
        assert step.weights is not None
        row = step.weights[:, :, :, -1].mean(dim=(1, 2))  # [B, L]
        view.slot_state["newest_weight"].copy_(row[:, None].expand(view.positions.shape))

    def scores(self, view: View) -> Scores:
        """One score for every KV head, whose slots hold the same tokens."""
        return view.slot_state["newest_weight"]
