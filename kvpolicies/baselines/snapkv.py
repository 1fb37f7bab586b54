"""snapkv: attention of an observation window, pooled (arXiv 2404.14469), in its decode form."""

from dataclasses import dataclass

from kvpolicies.kernels.observe import observation_weights
from kvpolicies.observation import NewestQueries, average_pool, odd_kernel
from kvpolicies.policy import Scores, View


@dataclass(frozen=True, kw_only=True)
class SnapKV(NewestQueries):
    """Attention of the newest queries, average-pooled along positions, maximum over the group.

    Evicts every `every` tokens (at most an eighth of the budget at once). The queries keep the
    rotation of their own positions; neighbours are neighbours in position, not in slot.
    """

    name = "snapkv"
    source = "SnapKV, arXiv 2404.14469 (decode form)"
    observe_window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        odd_kernel(self.kernel, "snapkv: kernel")

    @property
    def observed(self) -> int:
        """The observation window."""
        return self.observe_window

    def scores(self, view: View) -> Scores:
        """softmax -> sum over queries -> average-pool -> max over the group."""
        when = view.state["when"]
        weights = observation_weights(
            view.state["queries"], view.keys, when - 1, view.positions, view.scale, when > 0
        )
        return average_pool(weights.sum(dim=3), view.positions, self.kernel).amax(dim=2)
