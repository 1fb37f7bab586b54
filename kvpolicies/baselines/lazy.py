"""lazy: tokens that recur stay until they have been away for long (LazyEviction)."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.policy import Policy, Scores, Step, View, batched_drop, whole


@dataclass(frozen=True, kw_only=True)
class Lazy(Policy):
    """Recurrence: how long since a token was last attended, against its longest gap so far.

    A token is attended when its weight, maximum over the group, exceeds `alpha`; TS is the last
    such step, MRI the longest gap between two. Score = H1 + H2, H1 = 2 sigmoid(-(t - TS) / MRI) and
    H2 = 2 sigmoid(-1 / MRI), both 0 for a token that never recurred. How the paper combines H1 and
    H2, and its alpha, are not confirmed: the sum, and 1e-4, are readings.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "lazy"
    source = "LazyEviction, arXiv 2506.15969"
    needs_attention = True
    # TS - own position, so that a new token's zero says "at its own step".
    slot_tensors = MappingProxyType({"since": torch.int32, "gap": torch.int32})
    alpha: float = 1e-4
    """Attention above which a token counts as attended; from 0, below 1."""
    every: int = 32
    """Tokens between two evictions; at most an eighth of the budget goes at once."""

    def __post_init__(self) -> None:
        whole(self.every, 1, "lazy: every")
        if not 0 <= self.alpha < 1:
            raise UserError(f"lazy: alpha must lie in [0, 1), got {self.alpha!r}")

    def drop(self, budget: Budget) -> int:
        """See `batched_drop`."""
        return batched_drop(self.every, budget)

    def observe(self, view: View, step: Step) -> None:
        """Updates TS and MRI by each query in turn."""
        assert step.weights is not None
        own, since, gap = view.positions, view.slot_state["since"], view.slot_state["gap"]
        if step.positions.shape[1] == 1:  # the same, without a scan
            away = step.positions[:, :, None].to(torch.int32) - own
            hit = step.weights[:, :, :, 0].amax(dim=2) > self.alpha
            gap.copy_(torch.where(hit, torch.maximum(gap, away - since), gap))
            since.copy_(torch.where(hit, away, since))
            return
        last = (own + since)[:, :, None]
        now = step.positions[:, None, :, None].to(torch.int32)
        hit = step.weights.amax(dim=2) > self.alpha  # [B, H, n, L]
        times = torch.cat([last, torch.where(hit, now, -1)], dim=2).cummax(dim=2).values
        gaps = torch.where(hit, now - times[:, :, :-1], 0)
        gap.copy_(torch.maximum(gap, gaps.amax(dim=2)))
        since.copy_(times[:, :, -1] - own)

    def scores(self, view: View) -> Scores:
        """H1 + H2."""
        last, gap = view.positions + view.slot_state["since"], view.slot_state["gap"].float()
        away = (view.newest[:, None, None] - last).float()
        safe = gap.clamp_min(1)
        score = 2 * torch.sigmoid(-away / safe) + 2 * torch.sigmoid(-1 / safe)
        return torch.where(gap > 0, score, 0.0)
