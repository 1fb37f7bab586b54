"""What observation policies share: the newest N queries, and pooling along positions."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicies.policy import Geometry, Step, View


def newest_queries_state(geometry: Geometry, n: int) -> dict[str, Tensor]:
    """A ring of each row's newest `n` queries: `queries` [B, H, G, n, D], `when` [B, n] int32.

    `when` holds position + 1, so that zero means "no query yet".
    """
    g = geometry
    shape = (g.rows, g.heads, g.groups, n, g.head_dim)
    return {
        "queries": torch.zeros(shape, dtype=g.dtype, device=g.device),
        "when": torch.zeros(g.rows, n, dtype=torch.int32, device=g.device),
    }


def remember_newest(view: View, step: Step) -> None:
    """Writes a step's queries into the ring; position p lives at p % n."""
    ring, when = view.state["queries"], view.state["when"]
    n = when.shape[1]
    queries, positions = step.queries[:, :, :, -n:], step.positions[:, -n:]
    row = torch.arange(when.shape[0], device=when.device)[:, None]
    place = positions % n
    ring[row, :, :, place] = queries.permute(0, 3, 1, 2, 4).to(ring.dtype)
    when[row, place] = (positions + 1).to(when.dtype)


def in_position_order(positions: Int[Tensor, "B H L"]) -> tuple[Tensor, Tensor]:
    """(order, rank): order sorts slots by position, rank undoes it."""
    order = positions.argsort(dim=-1)
    return order, order.argsort(dim=-1)


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
    order, rank = (x[:, :, None].expand(scores.shape) for x in in_position_order(positions))
    ordered = scores.gather(-1, order).flatten(0, 2)[:, None]
    pooled = pool(ordered, kernel, stride=1, padding=kernel // 2)
    return pooled.view(scores.shape).gather(-1, rank)
