"""full: nothing is evicted, the reference of every comparison."""

from dataclasses import dataclass

import torch

from kvpolicies.policy import Policy, Scores, View


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Nothing is evicted: the reference. Its budget is prompt + max_new_tokens."""

    name = "full"
    source = "dense attention"
    evicts = False

    def scores(self, view: View) -> Scores:
        """All equal; never asked for."""
        return torch.zeros(view.positions.shape, device=view.positions.device)
