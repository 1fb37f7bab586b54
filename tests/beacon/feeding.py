"""Feeds chosen queries to a layer, so that what its policy kept can be looked at."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.policy import Geometry
from kvpolicies.registry import resolve
from kvpolicies.rope import Rope
from kvpolicies.step import LayerInput
from tests.support.layer import OneLayer, process

BUDGET = Budget(64, 0, 1)


def at(*degrees: float) -> Tensor:
    """Plane queries [1, 1, 1, T, 2] by their angle: one row, one head."""
    angle = torch.tensor(degrees) * math.pi / 180
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[None, None, None]


def angles(queries: Tensor) -> list[int]:
    """The angles of plane queries [N, 2], in whole degrees."""
    return [round(math.degrees(math.atan2(y, x))) % 360 for x, y in queries.tolist()]


def rope(dim: int) -> Rope:
    """A rotation that differs from pair to pair of coordinates."""

    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[..., None] / 100 ** (torch.arange(dim // 2) * 2 / dim)
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    return Rope(cos_sin)


def layer_for(
    spec: str,
    queries: Tensor,
    budget: Budget = BUDGET,
    *,
    rope: Rope | None = None,
    length: int = 99,
) -> OneLayer:
    """An empty layer of the queries' sizes [B, H, G, T, D]; without RoPE unless given one."""
    b, h, g, _, d = queries.shape
    geometry = Geometry(b, h, g, budget.total, d, queries.dtype, queries.device, length)
    layer = OneLayer(geometry, resolve(spec), 0, rope or Rope(None), length)
    for row in range(b):
        layer.reset(row, budget, row)
    return layer


def feed(layer: OneLayer, queries: Tensor, sizes: Sequence[int] | None = None) -> OneLayer:
    """Brings the queries of all rows, in forwards of so many tokens (default: one each).

    Keys are random, the same every time.
    """
    b, h, _, total, d = queries.shape
    keys = torch.randn(b, h, total, d, generator=torch.Generator().manual_seed(7))
    first = 0
    for n in [1] * total if sizes is None else sizes:
        part = slice(first, first + n)
        tokens = LayerInput(
            queries[:, :, :, part], keys[:, :, part], keys[:, :, part], None, LogitTransform(0.5)
        )
        process(layer, tokens, range(b), [n] * b)
        first += n
    return layer


def random_queries(*shape: int, seed: int = 0) -> Tensor:
    """[B, H, G, T, D]"""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
