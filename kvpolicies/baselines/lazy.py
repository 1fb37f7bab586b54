"""lazy: tokens that recur stay until they have been away for long (LazyEviction)."""

from dataclasses import dataclass
from operator import eq
from types import MappingProxyType

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.options import option
from kvpolicies.policy import (
    Geometry,
    Observation,
    Policy,
    Schedule,
    Scores,
    View,
    batched_drop,
)
from kvpolicies.transfer import on_device

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Lazy(Policy):
    """Recurrence: how long since a token was last attended, against its longest gap so far.

    A token is attended when its weight, maximum over the group, reaches `alpha` (the authors' code
    keeps a set for each query head). TS is the last such step, at first the step before the token's
    own; MRI is the longest gap between two, at first 0. At step t, score = H1 + H2:
    H1 = 2 sigmoid(-1 - (t - TS) / MRI), and H2 = 2 sigmoid(1 - MRI), 0 where MRI is. The prompt's
    queries are not looked at: while a prompt longer than the budget comes in, the newest stay.

    What one eviction frees is also the least that is protected of the newest tokens: the paper's W,
    `every`. It adds a buffer of W tokens on top of the budget, and has no sinks: `faithful=True`.
    (Its code empties the buffer at each W-th new token, however full it is; here it is full first.)

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "lazy"
    source = "LazyEviction, arXiv 2506.15969"
    layers_alike = True
    needs_attention = True
    # TS - its first value, so that a new token's zero says "not attended yet".
    slot_tensors = MappingProxyType({"since": torch.int32, "gap": torch.int32})
    alpha: float = option(1e-4, least=0, below=1)
    """Attention from which a token counts as attended; from 0, below 1. The authors' 1e-4 is for a
    thousand slots and more: where no weight is so small, all tie, and the newest stay."""
    every: int = option(101, least=1)
    """Tokens between two evictions: the paper's W, 101 (GSM8K), 175 (MATH) or 363 (AIME) in its
    code; at most an eighth of the budget goes at once."""
    faithful: bool = False
    """The paper's rule: W beside the budget, and no sinks."""

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Evicts in batches (`batched_drop`); as many of the newest tokens, W, are protected."""
        if not self.faithful:
            drop = batched_drop(self.every, budget)
            return Schedule.under(budget, drop, window=drop)
        if budget.total <= self.every:
            raise UserError(f"{self}: budget {budget.total} must be larger than every={self.every}")
        return Schedule.beside(budget, self.every, window=self.every)

    @property
    def own_rule(self) -> bool:
        """The paper's buffer."""
        return self.faithful

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """Tokens of each row's prompt, as far as it came in."""
        rows, device = geometry.rows, geometry.device
        return {"prompt": torch.zeros(rows, dtype=torch.int32, device=device)}

    def observe(self, view: View, step: Observation) -> None:
        """Updates TS and MRI by each query in turn, but for the prompt's."""
        assert step.weights is not None
        prompt = view.state["prompt"]
        came = list(map(eq, view.prompts, view.seen))  # of which rows prompt came in
        if any(came):  # no copy in a decode step
            prompt.copy_(on_device(view.prompts, prompt.device))
        if all(came):
            return
        looking = step.positions >= prompt[:, None]  # [B, n]
        first, since, gap = _first(view), view.slot_state["since"], view.slot_state["gap"]
        now = (step.positions[:, None, :, None] - first[:, :, None]).to(torch.int32)
        hit = step.weights.amax(dim=2) >= self.alpha  # [B, H, n, L]
        # A query does not look at later tokens; `now` of its own is 1, or more in the prompt.
        hit &= looking[:, None, :, None] & (now > 0)
        if step.positions.shape[1] == 1:  # the same, without a scan
            now, hit = now[:, :, 0], hit[:, :, 0]
            gap.copy_(torch.where(hit, torch.maximum(gap, now - since), gap))
            since.copy_(torch.where(hit, now, since))
            return
        times = torch.where(hit, now, -1)
        times = torch.cat([since[:, :, None], times], dim=2).cummax(dim=2).values
        gaps = torch.where(hit, now - times[:, :, :-1], 0)
        gap.copy_(torch.maximum(gap, gaps.amax(dim=2)))
        since.copy_(times[:, :, -1])

    def scores(self, view: View) -> Scores:
        """H1 + H2."""
        last, gap = _first(view) + view.slot_state["since"], view.slot_state["gap"].float()
        away = (view.newest[:, None, None] - last).float()
        stale = torch.sigmoid(-1 - away / (gap + EPS))
        return 2 * stale + 2 * torch.sigmoid(1 - gap) * (gap > 0)


def _first(view: View) -> Tensor:
    """TS [B, H, L] of tokens that were not attended yet: the step before the first they see."""
    return torch.maximum(view.positions, view.state["prompt"][:, None, None]) - 1
