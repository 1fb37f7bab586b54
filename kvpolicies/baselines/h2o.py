"""h2o: accumulated attention (arXiv 2306.14048)."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvpolicies.budget import Budget
from kvpolicies.policy import Observation, Policy, Schedule, Scores, View


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Attention summed over all queries so far, prompt included, and over the group's heads.

    `faithful=True` splits the budget as the paper does: half for the highest masses, half for the
    newest tokens, no sinks.
    """

    name = "h2o"
    source = "H2O, arXiv 2306.14048"
    layers_alike = True
    needs_attention = True
    slot_tensors = MappingProxyType({"mass": torch.float32})
    faithful: bool = False
    """The paper's split: half of the budget is the window, and there are no sinks."""

    @property
    def own_rule(self) -> bool:
        """The paper's split of the budget."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True`: the same slots, half of them the window."""
        if not self.faithful:
            return Schedule.under(budget)
        window = min(max(1, budget.total // 2), budget.total - 1)
        return Schedule.under(Budget(budget.total, 0, window))

    def observe(self, view: View, step: Observation) -> None:
        """Adds every new query's weights to the slots it saw."""
        assert step.weights is not None
        view.slot_state["mass"].add_(step.weights.sum(dim=(2, 3)))

    def scores(self, view: View) -> Scores:
        """The mass gathered since the token came."""
        return view.slot_state["mass"]
