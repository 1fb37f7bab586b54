"""triattention: where a key lies to the queries that a model usually asks (arXiv 2604.04921)."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.learned.base import check_base
from kvpolicies.learned.policy import ASSETS
from kvpolicies.learned.statistics import FILE, QueryStatistics, find_statistics, read_statistics
from kvpolicies.options import option
from kvpolicies.policy import Policy, Schedule, Scores, View, batched_drop

OWN = ASSETS / "triattention" / FILE
"""The embedded model's."""


@dataclass(frozen=True, kw_only=True)
class TriAttention(Policy):
    """Score = attention logits of the mean query from the positions to come, plus a norm term.

    Of a query head's calibrated mean m (before RoPE) and mean pair lengths a: s = k.Rm +
    sum over pairs of (a - |m|) |k|, with R the mean rotation to the next position plus 0, 1, 3, 7,
    ... up to `ahead` - 1; standardised over the tokens in question; maximum over the group. The
    authors write the first term as amplitudes and phases: it is the same number.

    `faithful=True` is the authors' rule: the prompt stays, no window is protected, and a buffer of
    `every` tokens lies beside the budget.

    Raises:
        UserError: for a value that an option cannot have; when statistics are used, if they are not
            there, not whole, or of another model.
    """

    name = "triattention"
    source = "TriAttention, arXiv 2604.04921"
    needs_rope = True
    mixes_heads = True  # statistics are of all heads
    statistics: str = ""
    """A file of `kvpolicies calibrate`, its folder or a hub id; empty: the embedded model's own."""
    every: int = option(128, least=1)
    """Tokens between two evictions; at most an eighth of the budget goes at once."""
    ahead: int = option(65536, least=1, most=1 << 30)
    """Distances 1, 2, 4, ... up to it are averaged."""
    standardise: bool = True
    """Each query head's scores are less their mean, over their standard deviation."""
    faithful: bool = False
    """The authors' rule: the prompt stays, no window, a buffer beside the budget."""

    @property
    def made_for(self) -> str | None:
        """The embedded model, unless statistics are given."""
        return None if self.statistics else "embedded"

    @cached_property
    def file(self) -> Path:
        """Where the statistics are.

        Raises:
            UserError: if they are not to be had.
        """
        return find_statistics(self.statistics) if self.statistics else OWN

    def check_model(self, model: Any) -> None:
        """Refuses a model that the statistics are not of.

        Raises:
            UserError: for that, and for a file that cannot be read.
        """
        found = read_statistics(self.file, torch.device("cpu"))
        check_base(found, model, str(self), "statistics")

    @property
    def own_rule(self) -> bool:
        """The authors' rule: the buffer beside the budget."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """In batches; under `faithful=True` the prompt stays, and a buffer is beside the budget.

        Raises:
            UserError: under `faithful=True`, if the prompt leaves nothing to choose.
        """
        if not self.faithful:
            return Schedule.under(budget, batched_drop(self.every, budget))
        budget = Budget(budget.total, 0, 0, keeps_prompt=True).for_prompt(prompt)
        return Schedule.beside(budget, self.every, sinks=prompt)

    @property
    def offsets(self) -> tuple[int, ...]:
        """How far behind the newest position the averaged ones lie: 1 + 1, 1 + 2, 1 + 4, ..."""
        return tuple(1 + (1 << i) for i in range(self.ahead.bit_length()))

    def scores(self, view: View) -> Scores:
        """The mean query's logits and the norm term -> standardised -> maximum over the group."""
        found = read_statistics(self.file, view.keys.device)
        mean, extra = self._of(found, view)
        query = view.rope.rotate_over(
            mean.expand(len(view.lengths), *mean.shape), view.newest, self.offsets
        )
        scores = torch.einsum("bhld,bhgd->bhgl", view.keys.float(), query)
        scores += torch.einsum("bhlp,hgp->bhgl", view.rope.sizes(view.keys), extra)
        if self.standardise:
            scores = _standardised(scores, view.contested[:, :, None])
        return scores.amax(dim=2)

    def _of(self, found: QueryStatistics, view: View) -> tuple[Tensor, Tensor]:
        """(mean query [H, G, D], what of a pair's length the mean does not explain [H, G, P])."""
        mean, size = found.mean[view.layer], found.size[view.layer]
        return mean, (size - view.rope.sizes(mean)) * view.rope.scales(mean)


def _standardised(scores: Tensor, among: Tensor) -> Tensor:
    """[B, H, G, L] less its mean, over its deviation, both over `among` [B, H, 1, L]."""
    n = among.sum(dim=-1, keepdim=True).clamp_min(1)
    apart = scores - (scores * among).sum(dim=-1, keepdim=True) / n
    spread = ((apart * among).square().sum(dim=-1, keepdim=True) / n).sqrt()
    return apart / spread.clamp_min(1e-6)
