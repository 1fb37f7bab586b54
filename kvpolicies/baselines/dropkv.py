"""dropkv: what the newest outputs would lose if one token were gone (DropKV)."""

from dataclasses import dataclass

from kvpolicies.budget import Budget
from kvpolicies.kernels.weights import observation_weights
from kvpolicies.observation import NewestQueries
from kvpolicies.options import option
from kvpolicies.policy import MOST_QUERIES, Schedule, Scores, View, batched_drop

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DropKV(NewestQueries):
    """Score = sum over queries and the group of (p / (1 - p))^2 |v - o|^2.

    p is the weight that one of the `observe_window` newest queries gives a token, v the token's
    value, and o what the query's attention gives. Without the token the others' weights grow so
    that they sum to one again, and the output moves by p / (1 - p) (o - v), exactly.

    `faithful=True` is the proposal's rule for prompts: the prompt, once complete, is compressed to
    the budget (no sinks), and every new token stays.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "dropkv"
    source = "DropKV, openreview MqfNzH3TVH (kvpress issue 284)"
    observe_window: int = option(32, least=1, most=MOST_QUERIES)
    """Newest queries that look, whose own tokens are protected."""
    faithful: bool = False
    """The proposal's rule: the prompt is compressed once, and every new token stays."""

    @property
    def observed(self) -> int:
        """The observation window."""
        return self.observe_window

    @property
    def own_rule(self) -> bool:
        """The one compression of the prompt."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True`: the prompt goes down to the budget, and all new tokens stay."""
        if not self.faithful:
            return Schedule.under(budget, batched_drop(self.every, budget), self.observe_window)
        self.must_exceed_window(budget)
        return Schedule.of_prompt(budget, prompt, limit, window=self.observe_window)

    def scores(self, view: View) -> Scores:
        """|v - o|^2 is multiplied out: no tensor of queries x slots x D is made."""
        when, values = view.state["when"], view.values.float()
        seen = (when - 1, view.positions, view.softmax, when > 0)
        weights = observation_weights(view.state["queries"], view.keys, *seen).flatten(2, 3)
        outputs = weights @ values  # [B, H, G N, D]
        apart = outputs.square().sum(dim=-1, keepdim=True) - 2 * outputs @ values.mT
        apart += values.square().sum(dim=-1)[:, :, None]
        odds = weights / (1 - weights).clamp_min(EPS)
        return (odds.square() * apart.clamp_min(0)).sum(dim=2)
