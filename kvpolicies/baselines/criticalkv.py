"""criticalkv: attention first, then attention times what a value adds to the output."""

from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.eviction import highest
from kvpolicies.kernels.observe import observation_scores
from kvpolicies.kernels.weights import observation_weights
from kvpolicies.observation import NewestQueries, average_pool, oldest_of
from kvpolicies.options import option
from kvpolicies.policy import MOST_QUERIES, Observation, Schedule, Scores, View, batched_drop
from kvpolicies.transfer import on_device


@dataclass(frozen=True, kw_only=True)
class CriticalKV(NewestQueries):
    """Half of what may stay by attention, the rest by (attention + `epsilon`) |W v|_1.

    Attention is SnapKV's: softmax of the `observe_window` newest queries over all cached keys, mean
    over them, average-pooled along positions before the window, mean over the group. |W v|_1 is
    the norm of what the layer's output projection makes of the value, mean over the group's heads.

    `defensive=True` takes the worst case over the window instead of the mean (DefensiveKV, arXiv
    2510.13334): the maximum over group and queries, and for each token at least the mean over all.
    `faithful=True` is the rule for prompts: the prompt, once complete, is compressed to the budget
    (no sinks), the window counts among the first half, and every new token stays.

    Raises:
        UserError: for a value that an option cannot have; for a model whose output projection
            cannot be read.
    """

    name = "criticalkv"
    source = "CriticalKV, arXiv 2502.03805"
    layers_alike = False  # output projections differ
    needs_output = True
    slot_tensors = MappingProxyType({"size": torch.float32})
    observe_window: int = option(32, least=1, most=MOST_QUERIES)
    """Newest queries that look, whose own tokens are protected."""
    kernel: int = option(5, least=1, odd=True)
    """Neighbours in position over which attention is averaged; odd."""
    epsilon: float = option(1e-4, least=0)
    """Attention that each key has at least, in the second half; 0 or more."""
    defensive: bool = False
    """The worst case over the window instead of the mean."""
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
            return Schedule.under(budget, batched_drop(self.every, budget), self.observe_window)
        self.must_exceed_window(budget)
        return Schedule.of_prompt(budget, prompt, limit, window=self.observe_window)

    def observe(self, view: View, step: Observation) -> None:
        """A value's part in the output does not change: it is taken once."""
        super().observe(view, step)
        slots, new = view.newest_values(step.positions.shape[1])
        view.slot_state["size"].scatter_(2, slots, output_size(new, view.output))

    def scores(self, view: View) -> Scores:
        """Attention's highest, then by both."""
        older = view.positions < oldest_of(view.state["when"])[:, None, None]
        attention = self._worst(view, older) if self.defensive else self._mean(view, older)
        first = attention.masked_fill(~view.contested, -torch.inf)
        half = [free // 2 for free in view.free]
        if self.faithful:  # of all that stays, of which the window comes first
            both = zip(view.free, view.windows, strict=True)
            half = [max(0, (free + window) // 2 - window) for free, window in both]
        chosen = highest(first, view.positions, on_device(half, first.device))
        score = (attention + self.epsilon) * view.slot_state["size"]
        return score.masked_fill(chosen | ~older, torch.inf)

    def _mean(self, view: View, older: Tensor) -> Tensor:
        when = view.state["when"]
        args = (view.state["queries"], view.keys, when - 1, view.positions, view.softmax, when > 0)
        mean = observation_scores(*args, pool="mean", per="head") * older[:, :, None]
        return average_pool(mean, view.positions, self.kernel).mean(dim=2)

    def _worst(self, view: View, older: Tensor) -> Tensor:
        when = view.state["when"]
        args = (view.state["queries"], view.keys, when - 1, view.positions, view.softmax, when > 0)
        each = observation_weights(*args).flatten(2, 3) * older[:, :, None]  # [B, H, G N, L]
        worst = average_pool(each, view.positions, self.kernel).amax(dim=2) * older
        return torch.maximum(worst, worst.sum(-1, True) / older.sum(-1, True).clamp_min(1))


def output_size(values: Tensor, output: Tensor | None) -> Tensor:
    """|W v|_1 [B, H, n] of values [B, H, n, D] under W [H, G, D, E], mean over the group.

    Products are in the model's own dtype, sums in float32; head by head, so that no more than
    [B, n, E] is held.
    """
    assert output is not None
    out = values.new_zeros(values.shape[:3], dtype=torch.float32)
    for h, g in product(range(output.shape[0]), range(output.shape[1])):
        projected = values[:, h].to(output.dtype) @ output[h, g]
        out[:, h] += projected.abs().sum(dim=-1, dtype=torch.float32)
    return out / output.shape[1]
