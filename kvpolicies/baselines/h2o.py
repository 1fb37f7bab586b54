"""h2o: accumulated attention (arXiv 2306.14048)."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvpolicies.policy import Policy, Scores, Step, View


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Attention summed over all queries so far, prompt included, and over the group's heads."""

    name = "h2o"
    source = "H2O, arXiv 2306.14048"
    needs_attention = True
    slot_tensors = MappingProxyType({"mass": torch.float32})

    def observe(self, view: View, step: Step) -> None:
        """Adds every new query's weights to the slots it saw."""
        assert step.weights is not None
        view.slot_state["mass"].add_(step.weights.sum(dim=(2, 3)))

    def scores(self, view: View) -> Scores:
        """The mass gathered since the token came."""
        return view.slot_state["mass"]
