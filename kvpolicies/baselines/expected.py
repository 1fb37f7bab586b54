"""expected: attention that queries like the newest would pay from the positions to come."""

from dataclasses import dataclass

import torch

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.observation import NewestQueries
from kvpolicies.options import option
from kvpolicies.policy import MOST_QUERIES, Schedule, Scores, View, batched_drop
from kvpolicies.transfer import on_device

SINKS = 4
"""First tokens of a sequence whose queries are unlike all others."""


@dataclass(frozen=True, kw_only=True)
class Expected(NewestQueries):
    """Expected attention of future queries, times the norm of the value.

    Queries before RoPE are taken as normal, with mean m and covariance S of the newest ones (the
    first four tokens' aside), and R is the mean rotation to the next `ahead` positions. A key's
    share is the softmax of s k.Rm + s^2 k.RSR'k / 2 over the keys that are no sinks (s the model's
    scale), mean over the group; score = (share + `epsilon`) |v|. A model's soft limit or sink in
    the softmax plays no part.

    `faithful=True` is the paper's rule for prompts: the prompt, once complete, is compressed to the
    budget beside four sinks, and every new token stays. Theirs looks with all queries of the
    prompt: let `observe_window` be as long as it.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "expected"
    source = "Expected Attention, arXiv 2510.00636"
    needs_rope = True
    observe_window: int = option(256, least=1, most=MOST_QUERIES)
    """Newest queries whose mean and covariance stand for those to come."""
    ahead: int = option(512, least=1, most=MOST_QUERIES)
    """Positions to come over which the rotation is averaged."""
    epsilon: float = option(0.02, least=0)
    """Share that each key has at least, 0 or more: the paper's; the authors' code has 0."""
    faithful: bool = False
    """The paper's rule: the prompt is compressed once, and every new token stays."""

    @property
    def observed(self) -> int:
        """The queries of the mean and the covariance."""
        return self.observe_window

    @property
    def own_rule(self) -> bool:
        """The paper's one compression of the prompt."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True`: the prompt goes down to the budget, and all new tokens stay."""
        if not self.faithful:
            return Schedule.under(budget, batched_drop(self.every, budget))
        if budget.total <= SINKS:
            raise UserError(f"{self}: budget {budget.total} must be larger than its {SINKS} sinks")
        return Schedule.of_prompt(budget, prompt, limit, sinks=SINKS)

    def scores(self, view: View) -> Scores:
        """softmax of the expected exponential -> mean over the group -> times |v|."""
        when, keys, scale = view.state["when"], view.keys.float(), view.softmax.scale
        counts = (when > SINKS).to(torch.float32)[:, None, None, :, None]  # 0 or 1, a query
        n = counts.sum(dim=3).clamp_min(1)  # [B, 1, 1, 1]
        raw = view.rope.unrotate(view.state["queries"], (when - 1).clamp_min(0))
        mean = (raw * counts).sum(dim=3) / n  # [B, H, G, D]
        apart = (raw - mean[:, :, :, None]) * counts
        spread = apart.mT @ apart / n[..., None]  # [B, H, G, D, D]
        mean = view.rope.rotate_ahead(mean, view.newest, self.ahead)
        for _ in range(2):  # R S R'
            spread = view.rope.rotate_ahead(spread, view.newest, self.ahead).mT
        logits = scale * torch.einsum("bhld,bhgd->bhgl", keys, mean)
        turned = keys[:, :, None] @ spread  # [B, H, G, L, D]
        logits += scale**2 / 2 * (turned * keys[:, :, None]).sum(dim=-1)
        sinks = on_device([s.sinks for s in view.schedules], keys.device)
        is_sink = view.positions < sinks[:, None, None]
        logits = logits.masked_fill(is_sink[:, :, None], torch.finfo(torch.float32).min)
        share = logits.softmax(dim=-1).mean(dim=2)
        return (share + self.epsilon) * view.values.float().norm(dim=-1)
