"""rkv: importance against redundancy (R-KV, arXiv 2505.24133)."""

from dataclasses import dataclass

from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.kernels.observe import observation_scores
from kvpolicies.kernels.redundancy import key_redundancy
from kvpolicies.observation import NewestQueries, max_pool, oldest_of
from kvpolicies.options import option
from kvpolicies.policy import MOST_QUERIES, Schedule, Scores, View, batched_drop


@dataclass(frozen=True, kw_only=True)
class RKV(NewestQueries):
    """Score = mix * importance - (1 - mix) * redundancy (the paper's lambda is `mix`).

    Importance: logits of the `alpha` newest queries, maximum over the group, softmax over the older
    keys, mean over queries, max-pooled along positions. Redundancy: see `key_redundancy`.
    The paper adds its buffer of `every` tokens on top of the budget, and has no sinks:
    `faithful=True`. Otherwise the buffer is inside the budget, at most an eighth of it.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "rkv"
    source = "R-KV, arXiv 2505.24133"
    alpha: int = option(8, least=1, most=MOST_QUERIES)
    """Newest queries that look, whose own tokens are protected."""
    kernel: int = option(7, least=1, odd=True)
    """Neighbours in position over which importance is max-pooled; odd."""
    mix: float = option(0.1, least=0, most=1)
    """Weight of importance against redundancy, 0 to 1: the paper's lambda."""
    beta: int = option(1, least=0)
    """Most recent alike neighbours of a key that do not count as redundancy."""
    faithful: bool = False
    """The paper's rule: the buffer beside the budget, and no sinks."""

    @property
    def observed(self) -> int:
        """The paper's alpha."""
        return self.alpha

    @property
    def own_rule(self) -> bool:
        """The paper's buffer beside the budget."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True`: the budget, and the buffer beside it, which is emptied at once."""
        if not self.faithful:
            return Schedule.under(budget, batched_drop(self.every, budget), self.alpha)
        self.must_exceed_window(budget)
        return Schedule.beside(budget, self.every, window=self.alpha)

    def scores(self, view: View) -> Scores:
        """Importance and redundancy of every key, all rows apart."""
        redundancy = key_redundancy(view.keys, view.positions, self.beta)
        return self.mix * self._importance(view) - (1 - self.mix) * redundancy

    def _importance(self, view: View) -> Tensor:
        when = view.state["when"]
        oldest = oldest_of(when)
        # Every query looks from just before the oldest one, so that it sees older keys only.
        before = (oldest[:, None] - 1).expand(when.shape)
        args = (view.state["queries"], view.keys, before, view.positions, view.softmax, when > 0)
        mean = observation_scores(*args, pool="mean", per="merged")
        pooled = max_pool(mean[:, :, None], view.positions, self.kernel)[:, :, 0]
        return pooled * (view.positions < oldest[:, None, None])
