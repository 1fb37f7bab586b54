"""oracle: keeps what the run to come will attend to; it cannot be deployed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.foresight import future_mass
from kvpolicies.options import option
from kvpolicies.policy import Policy, Schedule, Scores, View, batched_drop


@dataclass(frozen=True, kw_only=True)
class Oracle(Policy):
    """Attention that each token will still receive in a recorded full run.

    The run's own tokens must be known beforehand (`generate(forced=...)`): a full-cache run over
    them is recorded first (recording.py). At an eviction at position p, score = sum over all
    queries d > p of exp(q_d . k - LSE_d), maximum over the group: q_d the recorded query, LSE_d the
    log-sum-exp of its logits over the full cache, k the key as it lies in the cache. Nothing is
    pooled, and everything is summed anew at each eviction. It is greedy in one respect: it counts
    attention as the full cache gave it, not as it moves once other tokens are gone.

    The recording is not counted as policy state: nothing that could be deployed would hold it.
    Evicts every `every` tokens, at most an eighth of the budget at once.

    Raises:
        UserError: for `every` below 1; at an eviction, if no recording was handed to the cache.
    """

    name = "oracle"
    source = "no paper: future attention of the full cache"
    needs_future = True
    every: int = option(32, least=1)
    """Tokens between two evictions; at most an eighth of the budget goes at once."""

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Evicts in batches: see `batched_drop`."""
        return Schedule.under(budget, batched_drop(self.every, budget))

    def scores(self, view: View) -> Scores:
        """Row by row: recordings have different lengths."""
        return torch.stack([self._of_row(view, row) for row in range(len(view.seen))])

    def _of_row(self, view: View, row: int) -> Tensor:
        """[H, L]."""
        future, seen = view.futures[row], view.seen[row]
        if future is None:
            raise UserError(
                f"policy {self} looks ahead in a recorded full run, and none was handed to "
                "the cache: use kvpolicies.generate(..., forced=...)"
            )
        later, norm = future.queries[:, :, seen:], future.lse[:, :, seen:]
        return future_mass(later, norm, view.keys[row], view.softmax).amax(dim=1)
