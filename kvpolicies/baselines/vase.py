"""vase: values of a large range stay, and others by chance (VaSE, arXiv 2606.03928)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.draws import mix, normal, of_heads, uniform
from kvpolicies.errors import UserError
from kvpolicies.eviction import highest
from kvpolicies.kernels.observe import observation_scores
from kvpolicies.observation import NewestQueries, average_pool, oldest_of
from kvpolicies.options import option
from kvpolicies.policy import MOST_QUERIES, Schedule, Scores, View, batched_drop
from kvpolicies.transfer import on_device

SINKS = 4
POOL = 5
RANK = 20
FORMS = ("range", "dkv")


@dataclass(frozen=True, kw_only=True)
class VaSE(NewestQueries):
    """Half of what may stay has the largest range of its value; the rest is drawn.

    `form="range"`: of the slots that an eviction leaves to choose, `share` go to the tokens of the
    largest max v - min v; the others are drawn without replacement, with a chance in proportion to
    the attention of the `observe_window` newest queries: softmax over older keys, mean over
    queries, average-pooled along positions (5), mean over the group. `sample=False` takes the
    highest instead. `form="dkv"`: score = |k G|^2 |v G|^2, G a fresh D x 20 normal matrix at each
    eviction, over sqrt(20), one for all heads of a layer.

    What is drawn is a hash of the sequence, layer, head and position in time, so that a row draws
    alike in any batch. `faithful=True` is the authors' rule: four sinks, and a buffer as long as
    the window on top of the budget, emptied at once.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "vase"
    source = "VaSE, arXiv 2606.03928"
    layers_alike = False  # draws differ
    form: str = option("range", choices=FORMS)
    """`range`: by the value's range and by chance; `dkv`: by random projections."""
    share: float = option(0.5, least=0, most=1)
    """Under `range`: of the slots to choose, those for the largest ranges, 0 to 1."""
    sample: bool = True
    """Under `range`: the other slots are drawn; False: they go to the highest attention."""
    observe_window: int = option(64, least=1, most=MOST_QUERIES)
    """Newest queries that look, whose own tokens are protected."""
    faithful: bool = False
    """The authors' rule: four sinks, and a buffer beside the budget."""

    @property
    def observed(self) -> int:
        """The observation window."""
        return self.observe_window

    @property
    def own_rule(self) -> bool:
        """The authors' buffer beside the budget."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True`: a buffer as long as the window, which is emptied at once."""
        if not self.faithful:
            return Schedule.under(budget, batched_drop(self.every, budget), self.observe_window)
        if budget.total <= SINKS + self.observe_window:
            raise UserError(
                f"{self}: budget {budget.total} must be larger than its {SINKS} sinks and "
                f"{self.observe_window} observation queries"
            )
        return Schedule.beside(budget, self.observe_window, SINKS, self.observe_window)

    def scores(self, view: View) -> Scores:
        """Ranges and draws, or projected norms, by the form."""
        return self._range(view) if self.form == "range" else self._projected(view)

    def _range(self, view: View) -> Tensor:
        values = view.values.float()
        size = coarse(values.amax(dim=-1) - values.amin(dim=-1))
        size = size.masked_fill(~view.contested, -torch.inf)
        n = on_device([int(self.share * free) for free in view.free], size.device)
        large = highest(size, view.positions, n)
        score = self._attention(view)
        if self.sample:  # of log weights + Gumbel noise, the highest are a draw by the weights
            chance = mix(_now(view)[:, :, None] + view.positions)
            score = (score.double().log() - uniform(chance).log().neg().log()).float()
        return score.masked_fill(large, torch.inf)

    def _attention(self, view: View) -> Tensor:
        when = view.state["when"]
        # Every query looks from just before the oldest one, so that it sees older keys only.
        before = (oldest_of(when)[:, None] - 1).expand(when.shape)
        args = (view.state["queries"], view.keys, before, view.positions, view.softmax, when > 0)
        mean = observation_scores(*args, pool="mean", per="head")
        return average_pool(mean, view.positions, POOL).mean(dim=2)

    def _projected(self, view: View) -> Tensor:
        size = view.geometry.head_dim
        places = torch.arange(2 * size * RANK, device=view.keys.device)
        # One for all heads, of those that lie elsewhere too: the row's and the layer's.
        x = mix(mix(on_device(view.seeds, places.device)) + 65_537 * view.layer - 1)
        x = mix(mix(x + on_device(view.seen, places.device))[:, None] + places)
        g = (normal(x.view(-1, size, RANK, 2)) / RANK**0.5).float()[:, None]  # [B, 1, D, RANK]
        lengths = [(t.float() @ g).square().sum(dim=-1) for t in (view.keys, view.values)]
        return lengths[0] * lengths[1]


def coarse(x: Tensor) -> Tensor:
    """Numbers from 0 on, rounded to 13 bits.

    The first layer's values of equal tokens are equal but for the rounding of the product that made
    them, which the batch may change; so they tie, and the tie has a rule.
    """
    return ((x.contiguous().view(torch.int32) + 0x400) & ~0x7FF).view(torch.float32)


def _now(view: View) -> Tensor:
    """[B, H] hashes of sequence, layer, head and time."""
    return mix(of_heads(view) + on_device(view.seen, view.keys.device)[:, None])
