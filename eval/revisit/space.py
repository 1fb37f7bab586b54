"""Queries before RoPE: do those that look far back resemble each other? (BeaconKV's Fig. 4)

Mean cosines within and between the two kinds are exact over all queries: for unit vectors,
sum over pairs u.v = |sum u|^2, so that no N x N matrix is needed. The picture (cosine matrix, PCA)
is of a bounded number of evenly spaced queries of one head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.rope import Rope

COSINES = ("global-global", "local-local", "global-local")


def unrotated(rope: Rope, queries: Tensor, first: int) -> Iterator[Tensor]:
    """Queries [G, N, D] float32 before RoPE, a KV head at a time, of queries [H, G, N, D].

    Args:
        first: position of the first.
    """
    positions = torch.arange(first, first + queries.shape[2], device=queries.device)[None]
    for head in queries:
        yield rope.unrotate(head[None], positions)[0]


def mean_cosines(queries: Tensor, is_global: Tensor) -> list[float | None]:
    """Mean cosine of pairs of two different queries, as COSINES; None where there is no pair.

    Args:
        queries: [N, D].
        is_global: [N] bool.
    """
    units = torch.nn.functional.normalize(queries.double(), dim=-1)
    far, near = units[is_global], units[~is_global]
    n, m = len(far), len(near)
    between = (far.sum(0) @ near.sum(0)).item() / (n * m) if n and m else None
    return [_within(far), _within(near), between]


def _within(units: Tensor) -> float | None:
    n = len(units)
    if n < 2:
        return None
    own = (units * units).sum()  # a zero vector has no direction, and none with itself
    return ((units.sum(0).square().sum() - own) / (n * (n - 1))).item()


@dataclass
class Sample:
    """Evenly spaced queries of every head of one trace, kept until one head is chosen."""

    most: int
    heads: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By (layer, query head): queries [n, D] before RoPE, is_global [n]."""

    def places(self, count: int) -> Tensor:
        """Which of `count` queries: at most `most`, evenly spaced, the first and last included."""
        chosen = torch.linspace(0, count - 1, min(self.most, count), dtype=torch.float64)
        return chosen.round().long()

    def add(self, layer: int, head: int, queries: Tensor, is_global: Tensor) -> None:
        """Keeps some of one head's queries [N, D]."""
        at = self.places(len(is_global))
        self.heads[layer, head] = (queries.cpu()[at], is_global[at])

    def chosen(self, name: str | None) -> tuple[int, int]:
        """The head called LAYER.HEAD, or the one with the most even mixture of both kinds.

        Raises:
            UserError: no such head, or its layer slides.
        """
        if name is None:
            return max(self.heads, key=lambda at: (_mixture(self.heads[at][1]), -at[0], -at[1]))
        layer, head = map(int, name.split("."))
        if (layer, head) not in self.heads:
            raise UserError(f"revisit: no query head {name} in a full-attention layer")
        return layer, head

    def picture(self, name: str | None, first: int, count: int) -> dict[str, Any]:
        """Plain data for the picture of one head.

        Args:
            first: position of the first query. count: of all queries, N.
        """
        layer, head = self.chosen(name)
        queries, is_global = self.heads[layer, head]
        places, shares = principal(queries)
        units = torch.nn.functional.normalize(queries.double(), dim=-1)
        return {
            "layer": layer,
            "head": head,
            "positions": (self.places(count) + first).tolist(),
            "global": is_global.int().tolist(),
            "pca": [[round(x, 5) for x in row] for row in places.tolist()],
            "variance": [round(x, 5) for x in shares],
            "cosine": [[round(x, 3) for x in row] for row in (units @ units.T).tolist()],
        }


def principal(points: Tensor) -> tuple[Tensor, list[float]]:
    """Points [n, D] on their first two principal axes [n, 2], and the variance each one explains.

    Full SVD in float64; each axis points to where its largest coordinate lies.
    """
    centred = points.double() - points.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    places = torch.nn.functional.pad((u * s)[:, :2], (0, max(0, 2 - len(s))))
    extreme = places.gather(0, places.abs().argmax(0, keepdim=True))
    places = places * torch.where(extreme < 0, -1.0, 1.0)
    whole = s.square().sum().clamp_min(1e-300)
    shares = (s.square() / whole).tolist()
    return places, [*shares, 0.0, 0.0][:2]


def _mixture(is_global: Tensor) -> int:
    return int(min(is_global.sum(), (~is_global).sum()))
