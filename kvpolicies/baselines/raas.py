"""raas: a token stays for as long as queries keep looking at it (RaaS, arXiv 2502.11147)."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvpolicies.budget import Budget
from kvpolicies.options import option
from kvpolicies.policy import Observation, Policy, Schedule, Scores, View


@dataclass(frozen=True, kw_only=True)
class RaaS(Policy):
    """Score = the last step at which a token was looked at, at first its own: the oldest goes.

    It was looked at when its weight, maximum over the group, was above `alpha`; or, with `top`
    above 0, among that share of the visible slots with the highest weights. Evicts each step.

    `faithful=True` is the paper's rule: the prompt stays, and no window is protected. The authors'
    code keeps a set of pages of 16 tokens for each query head, and renews the half (`top=0.5`) that
    Quest's bounds rank highest.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "raas"
    source = "RaaS, arXiv 2502.11147"
    layers_alike = True
    needs_attention = True
    slot_tensors = MappingProxyType({"looked_at": torch.int32})
    alpha: float = option(1e-4, least=0, below=1)
    """Attention above which a token counts as looked at; from 0, below 1."""
    top: float = option(0.0, least=0, below=1)
    """Share of the slots that each step renews instead; 0 = those above `alpha`."""
    faithful: bool = False
    """The paper's rule: the prompt stays, and no window is protected."""

    @property
    def own_rule(self) -> bool:
        """The paper's, which keeps the prompt."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """One in, one out; under `faithful=True` beside the prompt.

        Raises:
            UserError: under `faithful=True`, if the prompt leaves nothing to choose.
        """
        if self.faithful:
            budget = Budget(budget.total, 0, 0, keeps_prompt=True).for_prompt(prompt)
        return Schedule.under(budget)

    def observe(self, view: View, step: Observation) -> None:
        """Stamps what each query looks at with its position + 1."""
        assert step.weights is not None
        weights = step.weights.amax(dim=2)  # [B, H, n, L]
        if self.top:
            visible = view.newest_slots(step.positions.shape[1]) + 1  # [B, n]
            rank = weights.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
            looked_at = rank < (visible * self.top).floor()[:, None, :, None]
        else:
            looked_at = weights > self.alpha
        now = (step.positions + 1).to(torch.int32)[:, None, :, None]
        stamps = torch.where(looked_at, now, 0).amax(dim=2)
        kept = view.slot_state["looked_at"]
        kept.copy_(torch.maximum(kept, stamps))

    def scores(self, view: View) -> Scores:
        """The last stamp, or the token's own position + 1 (exact up to 2^24 tokens)."""
        return torch.maximum(view.slot_state["looked_at"], view.positions + 1).float()
