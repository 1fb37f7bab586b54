"""snapkv: attention of an observation window, pooled (arXiv 2404.14469), in its decode form."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.observe import observation_weights
from kvpolicies.observation import average_pool, newest_queries_state, remember_newest
from kvpolicies.policy import Geometry, Policy, Scores, Step, View, batched_drop, whole


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Attention of the newest queries, average-pooled along positions, maximum over the group.

    Evicts every `every` tokens (at most an eighth of the budget at once). The queries keep the
    rotation of their own positions; neighbours are neighbours in position, not in slot.
    """

    name = "snapkv"
    source = "SnapKV, arXiv 2404.14469 (decode form)"
    observe_window: int = 32
    kernel: int = 5
    every: int = 32

    def __post_init__(self) -> None:
        whole(self.observe_window, 1, "snapkv: observe_window")
        whole(self.every, 1, "snapkv: every")
        odd_kernel(self.kernel, "snapkv: kernel")

    def drop(self, budget: Budget) -> int:
        """See `batched_drop`."""
        return batched_drop(self.every, budget)

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """The newest `observe_window` queries."""
        return newest_queries_state(geometry, self.observe_window)

    def observe(self, view: View, step: Step) -> None:
        """Remembers the newest queries."""
        remember_newest(view, step)

    def scores(self, view: View) -> Scores:
        """softmax -> sum over queries -> average-pool -> max over the group."""
        when = view.state["when"]
        weights = observation_weights(
            view.state["queries"], view.keys, when - 1, view.positions, view.scale, when > 0
        )
        return average_pool(weights.sum(dim=3), view.positions, self.kernel).amax(dim=2)


def odd_kernel(kernel: Any, what: str) -> None:
    """Raises UserError unless the pooling kernel is a positive odd number."""
    whole(kernel, 1, what)
    if kernel % 2 == 0:
        raise UserError(f"{what} must be odd, so that a token is the middle of it, got {kernel}")
