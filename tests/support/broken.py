"""A policy whose scores are not numbers."""

from dataclasses import dataclass

import torch

from kvpolicies.policy import Policy, View


@dataclass(frozen=True, kw_only=True)
class Broken(Policy):
    """Every score is NaN."""

    name = "broken"

    def scores(self, view: View) -> torch.Tensor:
        """NaN [B, H, L]."""
        return torch.full(view.positions.shape, float("nan"))
