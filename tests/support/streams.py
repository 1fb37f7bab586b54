"""Runs our cache on the reference's random sequences, without a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.policy import Geometry, Policy
from kvpolicies.rope import Rope
from kvpolicies.step import LayerInput
from tests.support.layer import OneLayer, process


def rope_of(stream: Any, dim: int) -> Rope:
    """The reference's rotation as cos and sin tables."""

    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        unit = np.zeros(dim)
        unit[: dim // 2] = 1.0
        turned = np.stack([stream.rope(unit, int(p)) for p in positions[0]])
        cos, sin = turned[:, : dim // 2], turned[:, dim // 2 :]
        both = [np.concatenate([x, x], axis=1) for x in (cos, sin)]
        return torch.tensor(both[0])[None], torch.tensor(both[1])[None]

    return Rope(cos_sin)


def layer_for(stream: Any, policy: Policy, budget: Budget, rows: int = 1, **kw: Any) -> OneLayer:
    """A layer of the stream's sizes, with a trace of its length; all rows alike."""
    return layer_of([stream] * rows, policy, [budget] * rows, **kw)


def layer_of(
    streams: Sequence[Any],
    policy: Policy,
    budgets: Sequence[Budget],
    dtype: torch.dtype = torch.float32,
) -> OneLayer:
    """A layer with one row for each stream, under what the policy makes of its budget."""
    heads, group, _, dim = streams[0].q.shape
    longest = max(stream.tokens for stream in streams)
    schedules = [
        policy.schedule(budget, stream.prompt, stream.tokens - stream.prompt)
        for stream, budget in zip(streams, budgets, strict=True)
    ]
    geometry = Geometry(
        rows=len(streams),
        heads=heads,
        groups=group,
        slots=max(schedule.capacity for schedule in schedules),
        head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
        length=longest,
    )
    output = torch.tensor(streams[0].output, dtype=dtype)
    layer = OneLayer(geometry, policy, 0, rope_of(streams[0], dim), longest, output)
    for row, (stream, budget) in enumerate(zip(streams, schedules, strict=True)):
        layer.reset(row, budget, 0, _future_of(stream) if policy.needs_future else None)
    return layer


def _future_of(stream: Any) -> Any:
    """The recording of a full cache's run over the stream."""
    from kvpolicies.recording import Future
    from tests.reference.windowed import log_sum_exps

    both = (torch.tensor(x, dtype=torch.float32) for x in (stream.q, log_sum_exps(stream)))
    return Future(*both)


def tokens_of(stream: Any, first: int, last: int) -> LayerInput:
    """LayerInput first .. last - 1 as one row of a forward."""
    q, k, v = (
        torch.tensor(x[..., first:last, :].copy(), dtype=torch.float32)[None]
        for x in (stream.q, stream.k, stream.v)
    )
    return LayerInput(q, k, v, None, LogitTransform(stream.q.shape[-1] ** -0.5))


def left_padded(rows: Sequence[LayerInput]) -> LayerInput:
    """One forward of rows of different lengths; in the padding stands what must not matter."""
    width = max(row.keys.shape[2] for row in rows)

    def pad(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, width - x.shape[-2], 0), value=9.0)

    q = torch.cat([pad(row.queries) for row in rows])
    k = torch.cat([pad(row.keys) for row in rows])
    v = torch.cat([pad(row.values) for row in rows])
    return LayerInput(q, k, v, None, LogitTransform(q.shape[-1] ** -0.5))


def run_stream(layer: OneLayer, stream: Any, row: int = 0) -> Tensor:
    """Prompt in one forward, then token by token; returns eviction times [H, T]."""
    return _run(layer, [stream], [row])[0]


def run_streams(layer: OneLayer, streams: Sequence[Any]) -> list[Tensor]:
    """All prompts in one left-padded forward, then token by token; eviction times [H, T] each.

    A row whose stream has ended takes no part in the forwards that follow.
    """
    return _run(layer, streams, list(range(len(streams))))


def _run(layer: OneLayer, streams: Sequence[Any], rows: Sequence[int]) -> list[Tensor]:
    done = [0] * len(streams)
    while active := [i for i, stream in enumerate(streams) if done[i] < stream.tokens]:
        ends = [done[i] + 1 if done[i] else streams[i].prompt for i in active]
        parts = [tokens_of(streams[i], done[i], end) for i, end in zip(active, ends, strict=True)]
        counts = [end - done[i] for i, end in zip(active, ends, strict=True)]
        process(layer, left_padded(parts), [rows[i] for i in active], counts)
        for i, end in zip(active, ends, strict=True):
            done[i] = end
    assert layer.eviction_times is not None
    return [
        layer.eviction_times[row, :, : stream.tokens]
        for row, stream in zip(rows, streams, strict=True)
    ]
