"""full: nothing is evicted, the reference of every comparison."""

from dataclasses import dataclass

import torch

from kvpolicies.budget import Budget
from kvpolicies.policy import Policy, Schedule, Scores, View


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Nothing is evicted: the reference. Its budget is prompt + max_new_tokens."""

    name = "full"
    source = "dense attention"
    evicts = False

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Every slot is filled, and none is ever freed."""
        return Schedule(budget.total, drop=0)

    def scores(self, view: View) -> Scores:
        """All equal; never asked for."""
        return torch.zeros(view.positions.shape, device=view.positions.device)
