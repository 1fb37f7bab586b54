"""rpc: attention of the newest queries, one set a layer (Reasoning Path Compression)."""

from dataclasses import dataclass

from kvpolicies.budget import Budget
from kvpolicies.kernels.observe import observation_weights
from kvpolicies.observation import NewestQueries, average_pool, odd_kernel, oldest_of
from kvpolicies.policy import Scores, View


@dataclass(frozen=True, kw_only=True)
class RPC(NewestQueries):
    """Attention of the newest queries to older keys, averaged over all heads, pooled.

    One kept set a layer. The paper never evicts the prompt and lets the cache grow by P/c every P
    tokens; here every eviction goes down to the fixed budget, at most an eighth of it at once.
    """

    name = "rpc"
    source = "RPC, arXiv 2505.13866 (fixed budget)"
    observe_window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        odd_kernel(self.kernel, "rpc: kernel")

    @property
    def observed(self) -> int:
        """The paper's R."""
        return self.observe_window

    def protects(self, budget: Budget) -> int:
        """The observation window itself."""
        return self.observe_window

    def scores(self, view: View) -> Scores:
        """softmax over older keys -> sum over queries -> mean over heads -> average-pool."""
        when = view.state["when"]
        oldest = oldest_of(when)
        older = view.positions < oldest[:, None, None]
        # Every query looks from just before the oldest one, so that it sees older keys only.
        before = (oldest[:, None] - 1).expand(when.shape)
        weights = observation_weights(
            view.state["queries"], view.keys, before, view.positions, view.scale, when > 0
        )
        mass = weights.sum(dim=3).mean(dim=(1, 2), keepdim=True)  # slots align across heads
        pooled = average_pool(mass.expand((*weights.shape[:2], 1, -1)), view.positions, self.kernel)
        return pooled[:, :, 0].masked_fill(~older, float("inf"))
