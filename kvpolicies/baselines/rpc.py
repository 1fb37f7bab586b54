"""rpc: attention of the newest queries, one set a layer (Reasoning Path Compression)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.baselines.snapkv import odd_kernel
from kvpolicies.budget import Budget
from kvpolicies.kernels.observe import observation_weights
from kvpolicies.observation import average_pool, newest_queries_state, remember_newest
from kvpolicies.policy import Geometry, Policy, Scores, Step, View, batched_drop, whole


@dataclass(frozen=True, kw_only=True)
class RPC(Policy):
    """Attention of the newest queries to older keys, averaged over all heads, pooled.

    One kept set a layer. The paper never evicts the prompt and lets the cache grow by P/c every P
    tokens; here every eviction goes down to the fixed budget, at most an eighth of it at once.
    """

    name = "rpc"
    source = "RPC, arXiv 2505.13866 (fixed budget)"
    observe_window: int = 32
    kernel: int = 7
    every: int = 32

    def __post_init__(self) -> None:
        whole(self.observe_window, 1, "rpc: observe_window")
        whole(self.every, 1, "rpc: every")
        odd_kernel(self.kernel, "rpc: kernel")

    def drop(self, budget: Budget) -> int:
        """See `batched_drop`."""
        return batched_drop(self.every, budget)

    def protects(self, budget: Budget) -> int:
        """The observation window itself."""
        return self.observe_window

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """The newest `observe_window` queries."""
        return newest_queries_state(geometry, self.observe_window)

    def observe(self, view: View, step: Step) -> None:
        """Remembers the newest queries."""
        remember_newest(view, step)

    def scores(self, view: View) -> Scores:
        """softmax over older keys -> sum over queries -> mean over heads -> average-pool."""
        when = view.state["when"]
        exists = when > 0
        oldest = torch.where(exists, when, torch.iinfo(torch.int32).max).amin(dim=1) - 1
        older = view.positions < oldest[:, None, None]
        # Every query looks from just before the oldest one, so that it sees older keys only.
        before = (oldest[:, None] - 1).expand(when.shape)
        weights = observation_weights(
            view.state["queries"], view.keys, before, view.positions, view.scale, exists
        )
        mass = weights.sum(dim=3).mean(dim=(1, 2), keepdim=True)  # slots align across heads
        pooled = average_pool(mass.expand((*weights.shape[:2], 1, -1)), view.positions, self.kernel)
        return pooled[:, :, 0].masked_fill(~older, float("inf"))
