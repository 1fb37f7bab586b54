"""What observation policies share: the newest N queries, and pooling along positions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.options import option
from kvpolicies.policy import (
    Geometry,
    Observation,
    Policy,
    Schedule,
    View,
    batched_drop,
)


@dataclass(frozen=True, kw_only=True)
class NewestQueries(Policy):
    """Base of policies that look at the cache with their newest queries, and evict in batches.

    Keeps a ring of each row's newest `observed` queries: `queries` [B, H, G, N, D], and `when`
    [B, N] int32, which holds position + 1 so that zero means "no query yet".
    """

    layers_alike = True
    every: int = option(128, least=1)
    """Tokens between two evictions; at most an eighth of the budget goes at once."""

    @property
    def observed(self) -> int:
        """N, how many queries look."""
        raise NotImplementedError

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Evicts in batches: see `batched_drop`."""
        return Schedule.under(budget, batched_drop(self.every, budget))

    def must_exceed_window(self, budget: Budget) -> None:
        """Raises UserError if a paper's rule finds no slot beside its own observation window."""
        if budget.total <= self.observed:
            raise UserError(
                f"{self}: budget {budget.total} must be larger than its {self.observed} "
                "observation queries"
            )

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """An empty ring for every row."""
        g = geometry
        shape = (g.rows, g.heads, g.groups, self.observed, g.head_dim)
        return {
            "queries": torch.zeros(shape, dtype=g.dtype, device=g.device),
            "when": torch.zeros(g.rows, self.observed, dtype=torch.int32, device=g.device),
        }

    def observe(self, view: View, step: Observation) -> None:
        """Writes a step's queries into the ring."""
        write_newest(view.state["queries"], view.state["when"], step)


def write_newest(
    ring: Float[Tensor, "B H G N D"], when: Int[Tensor, "B N"], step: Observation
) -> None:
    """Writes a step's queries into a ring of the newest N; position p lives at p % N."""
    n = ring.shape[3]
    queries, positions = step.queries[:, :, :, -n:], step.positions[:, -n:]
    place = positions % n
    where = place[:, None, None, :, None].expand(queries.shape)
    ring.scatter_(3, where, queries.to(ring.dtype))
    when.scatter_(1, place, (positions + 1).to(when.dtype))


def oldest_of(when: Int[Tensor, "B N"]) -> Int[Tensor, "B"]:
    """Position of each row's oldest query in the ring."""
    return torch.where(when > 0, when, torch.iinfo(torch.int32).max).amin(dim=1) - 1


def average_pool(
    scores: Float[Tensor, "B H G L"], positions: Int[Tensor, "B H L"], kernel: int
) -> Float[Tensor, "B H G L"]:
    """Mean over `kernel` neighbours in position order; beyond either end there are zeros.

    (As SnapKV's own `avg_pool1d`, which divides by the kernel at the ends too.)
    """
    return _pooled(scores, positions, kernel, F.avg_pool1d)


def max_pool(
    scores: Float[Tensor, "B H G L"], positions: Int[Tensor, "B H L"], kernel: int
) -> Float[Tensor, "B H G L"]:
    """Maximum over `kernel` neighbours in position order."""
    return _pooled(scores, positions, kernel, F.max_pool1d)


def _pooled(scores: Tensor, positions: Tensor, kernel: int, pool) -> Tensor:
    order = positions.argsort(dim=-1)[:, :, None].expand(scores.shape)
    ordered = scores.gather(-1, order).flatten(0, 2)[:, None]
    pooled = pool(ordered, kernel, stride=1, padding=kernel // 2).view(scores.shape)
    return torch.empty_like(pooled).scatter_(-1, order, pooled)
