"""longflow: the least part of the newest output goes (LongFlow, arXiv 2603.11504)."""

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from kvpolicies.budget import Budget
from kvpolicies.policy import Observation, Policy, Schedule, Scores, View


@dataclass(frozen=True, kw_only=True)
class LongFlow(Policy):
    """Score = sum over all heads of |a v|_1, of the newest query's weight a: one set a layer.

    Evicts each step. The authors protect neither sinks nor window (`faithful=True`), and compress
    a prompt longer than the budget by SnapKV's score; here it goes by the same score.
    """

    name = "longflow"
    source = "LongFlow, arXiv 2603.11504"
    layers_alike = True
    mixes_heads = True
    one_set = True
    needs_attention = True
    slot_tensors = MappingProxyType({"weight": torch.float32, "size": torch.float32})
    faithful: bool = False
    """The authors' rule: neither sinks nor window are protected."""

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True` nothing is protected."""
        common = Schedule.under(budget)
        return replace(common, sinks=0, window=0) if self.faithful else common

    def observe(self, view: View, step: Observation) -> None:
        """Keeps the last query's row, summed over the group; takes a value's norm once."""
        assert step.weights is not None
        view.slot_state["weight"].copy_(step.weights[:, :, :, -1].sum(dim=2))
        slots, new = view.newest_values(step.positions.shape[1])
        view.slot_state["size"].scatter_(2, slots, new.float().abs().sum(dim=-1))

    def scores(self, view: View) -> Scores:
        """One score for every KV head, whose slots hold the same tokens."""
        part = view.slot_state["weight"] * view.slot_state["size"]
        return part.sum(dim=1, keepdim=True).expand(view.positions.shape)
