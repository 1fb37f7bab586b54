"""rkv: importance against redundancy (R-KV, arXiv 2505.24133)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.baselines.snapkv import odd_kernel
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.redundancy import key_redundancy
from kvpolicies.observation import max_pool, newest_queries_state, remember_newest
from kvpolicies.policy import Geometry, Policy, Scores, Step, View, batched_drop, whole


@dataclass(frozen=True, kw_only=True)
class RKV(Policy):
    """Score = mix * importance - (1 - mix) * redundancy (the paper's lambda is `mix`).

    Importance: logits of the `alpha` newest queries, maximum over the group, softmax over the older
    keys, mean over queries, max-pooled along positions. Redundancy: see `key_redundancy`.
    The paper adds its buffer of `every` tokens on top of the budget; here the buffer is inside it,
    at most an eighth of it.
    """

    name = "rkv"
    source = "R-KV, arXiv 2505.24133"
    every: int = 128
    alpha: int = 8
    kernel: int = 7
    mix: float = 0.1
    beta: int = 1

    def __post_init__(self) -> None:
        for option, least in (("every", 1), ("alpha", 1), ("beta", 0)):
            whole(getattr(self, option), least, f"rkv: {option}")
        odd_kernel(self.kernel, "rkv: kernel")
        if not 0 <= self.mix <= 1:
            raise UserError(f"rkv: mix must lie in [0, 1], got {self.mix!r}")

    def drop(self, budget: Budget) -> int:
        """See `batched_drop`."""
        return batched_drop(self.every, budget)

    def protects(self, budget: Budget) -> int:
        """The observation window itself."""
        return self.alpha

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """The newest `alpha` queries."""
        return newest_queries_state(geometry, self.alpha)

    def observe(self, view: View, step: Step) -> None:
        """Remembers the newest queries."""
        remember_newest(view, step)

    def scores(self, view: View) -> Scores:
        """Importance and redundancy of every key, all rows apart."""
        redundancy = key_redundancy(view.keys, view.positions, self.beta)
        return self.mix * self._importance(view) - (1 - self.mix) * redundancy

    def _importance(self, view: View) -> Tensor:
        when = view.state["when"]
        queries = view.state["queries"].float()
        logits = torch.einsum("bhgnd,bhld->bhgnl", queries, view.keys.float()) * view.scale
        logits = logits.amax(dim=2)  # [B, H, N, L]
        exists = when > 0
        oldest = torch.where(exists, when, torch.iinfo(torch.int32).max).amin(dim=1) - 1
        older = (view.positions < oldest[:, None, None])[:, :, None]
        weights = logits.masked_fill(~older, torch.finfo(torch.float32).min).softmax(-1) * older
        weights = weights * exists[:, None, :, None]
        mean = weights.sum(dim=2, keepdim=True) / exists.sum(1)[:, None, None, None]
        return max_pool(mean, view.positions, self.kernel)[:, :, 0] * older[:, :, 0]
