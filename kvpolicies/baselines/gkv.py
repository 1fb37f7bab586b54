"""gkv: attention that is remembered, against redundancy (G-KV, arXiv 2512.00504)."""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.kernels.redundancy import key_redundancy
from kvpolicies.kernels.weights import observation_weights
from kvpolicies.observation import NewestQueries, oldest_of
from kvpolicies.options import option
from kvpolicies.policy import MOST_QUERIES, Schedule, Scores, View, batched_drop


@dataclass(frozen=True, kw_only=True)
class GKV(NewestQueries):
    """Score = mix F - (1 - mix) R: F importance so far, R R-KV's redundancy.

    At each eviction the `observe_window` newest queries look at all cached keys: A is the maximum
    of their weights over the group, mean over the queries, divided by the largest of a token older
    than they; F becomes the larger of A and `decay` F, and is kept with the token. R is divided by
    its maximum over the same tokens (`key_redundancy`).

    The authors add a buffer of `every` tokens on top of the budget, and have no sinks:
    `faithful=True`.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "gkv"
    source = "G-KV, arXiv 2512.00504"
    slot_tensors = MappingProxyType({"importance": torch.float32})
    observe_window: int = option(16, least=1, most=MOST_QUERIES)
    """Newest queries that look, whose own tokens are protected."""
    decay: float = option(0.8, least=0, most=1)
    """What importance keeps of itself from one eviction to the next, 0 to 1."""
    mix: float = option(0.5, least=0, most=1)
    """Weight of importance against redundancy, 0 to 1."""
    faithful: bool = False
    """The authors' rule: the buffer beside the budget, and no sinks."""

    @property
    def observed(self) -> int:
        """The observation window."""
        return self.observe_window

    @property
    def own_rule(self) -> bool:
        """The authors' buffer beside the budget."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True`: the budget, and the buffer beside it, which is emptied at once."""
        if not self.faithful:
            return Schedule.under(budget, batched_drop(self.every, budget), self.observe_window)
        self.must_exceed_window(budget)
        return Schedule.beside(budget, self.every, window=self.observe_window)

    def scores(self, view: View) -> Scores:
        """Renews F, and sets it against R."""
        older = view.positions < oldest_of(view.state["when"])[:, None, None]
        kept = view.slot_state["importance"]
        kept.copy_(torch.maximum(_scaled(self._attention(view), older), self.decay * kept) * older)
        redundancy = _scaled(key_redundancy(view.keys, view.positions), older)
        return self.mix * kept - (1 - self.mix) * redundancy

    def _attention(self, view: View) -> Tensor:
        """[B, H, L]: maximum over the group, mean over the queries that there are."""
        when = view.state["when"]
        seen = (when - 1, view.positions, view.softmax, when > 0)
        weights = observation_weights(view.state["queries"], view.keys, *seen)
        count = (when > 0).sum(dim=1).clamp_min(1)
        return weights.amax(dim=2).sum(dim=2) / count[:, None, None]


def _scaled(x: Tensor, among: Tensor) -> Tensor:
    """x [B, H, L] over its maximum in these slots."""
    return x / (x * among).amax(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
