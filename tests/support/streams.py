"""Runs our cache on the reference's random sequences, without a model."""

from typing import Any

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.layer import SlotLayer
from kvpolicies.policy import Geometry, Policy
from kvpolicies.rope import Rope
from kvpolicies.steps import Tokens, process


def rope_of(stream: Any, dim: int) -> Rope:
    """The reference's rotation as cos and sin tables."""
    import numpy as np

    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        unit = np.zeros(dim)
        unit[: dim // 2] = 1.0
        turned = np.stack([stream.rope(unit, int(p)) for p in positions[0]])
        cos, sin = turned[:, : dim // 2], turned[:, dim // 2 :]
        both = [np.concatenate([x, x], axis=1) for x in (cos, sin)]
        return torch.tensor(both[0])[None], torch.tensor(both[1])[None]

    return Rope(cos_sin)


def layer_for(stream: Any, policy: Policy, budget: Budget, rows: int = 1, **kw: Any) -> SlotLayer:
    """A layer of the stream's sizes, with a trace of its length."""
    heads, group, tokens, dim = stream.q.shape
    geometry = Geometry(
        rows, heads, group, budget.total, dim, kw.get("dtype", torch.float32), torch.device("cpu")
    )
    layer = SlotLayer(geometry, policy, 0, rope_of(stream, dim), tokens)
    for row in range(rows):
        layer.reset(row, budget, 0)
    return layer


def tokens_of(stream: Any, first: int, last: int) -> Tokens:
    """Tokens first .. last - 1 as one row of a forward."""
    q, k = (
        torch.tensor(x[..., first:last, :], dtype=torch.float32)[None] for x in (stream.q, stream.k)
    )
    return Tokens(q, k, k, None, stream.q.shape[-1] ** -0.5)


def run_stream(layer: SlotLayer, stream: Any, row: int = 0) -> Tensor:
    """Prompt in one forward, then token by token; returns eviction times [H, T]."""
    end = stream.k.shape[1]
    calls = [(0, stream.prompt), *((t, t + 1) for t in range(stream.prompt, end))]
    for first, last in calls:
        process(layer, tokens_of(stream, first, last), [row], [last - first])
    assert layer.eviction_times is not None
    return layer.eviction_times[row]
