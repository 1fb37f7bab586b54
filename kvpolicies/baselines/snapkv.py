"""snapkv: attention of an observation window, pooled (arXiv 2404.14469), in its decode form."""

from dataclasses import dataclass

from kvpolicies.budget import Budget
from kvpolicies.kernels.observe import observation_scores
from kvpolicies.observation import NewestQueries, average_pool, oldest_of
from kvpolicies.options import option
from kvpolicies.policy import MOST_QUERIES, Schedule, Scores, View, batched_drop


@dataclass(frozen=True, kw_only=True)
class SnapKV(NewestQueries):
    """Attention of the newest queries, average-pooled along positions, maximum over the group.

    Their softmax runs over all cached keys; the tokens before the window are pooled among
    themselves, with zeros beyond either end, and the window itself is kept. The queries keep the
    rotation of their own positions; neighbours are neighbours in position, not in slot. Evicts
    every `every` tokens (at most an eighth of the budget at once). The maximum over the group is
    ours: the authors' code keeps a set for each query head.

    `faithful=True` is the paper's rule: the prompt, once complete, is compressed to the budget (no
    sinks), and every new token stays.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "snapkv"
    source = "SnapKV, arXiv 2404.14469 (decode form)"
    observe_window: int = option(32, least=1, most=MOST_QUERIES)
    """Newest queries that look, whose own tokens are protected."""
    kernel: int = option(5, least=1, odd=True)
    """Neighbours in position over which scores are averaged; odd."""
    faithful: bool = False
    """The paper's rule: the prompt is compressed once, and every new token stays."""

    @property
    def observed(self) -> int:
        """The observation window."""
        return self.observe_window

    @property
    def own_rule(self) -> bool:
        """The paper's one compression of the prompt."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True`: the prompt goes down to the budget, and all new tokens stay."""
        if not self.faithful:
            drop = batched_drop(self.every, budget)
            return Schedule.under(budget, drop, self.observe_window)
        self.must_exceed_window(budget)
        return Schedule.of_prompt(budget, prompt, limit, window=self.observe_window)

    def scores(self, view: View) -> Scores:
        """softmax -> sum over queries -> average-pool before the window -> max over the group."""
        when = view.state["when"]
        args = (view.state["queries"], view.keys, when - 1, view.positions, view.softmax, when > 0)
        older = view.positions < oldest_of(when)[:, None, None]
        mass = observation_scores(*args, pool="sum", per="head") * older[:, :, None]
        pooled = average_pool(mass, view.positions, self.kernel).amax(dim=2)
        return pooled.masked_fill(~older, float("inf"))
