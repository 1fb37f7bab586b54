"""One layer of slots without a model: what tests of policies look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.policy import Geometry, Policy, Schedule, View
from kvpolicies.rope import Rope
from kvpolicies.rows import Counts
from kvpolicies.slots import SlotGroup
from kvpolicies.step import LayerInput, attend


class OneLayer:
    """A group of one layer, whose tensors have no layer axis here."""

    def __init__(
        self,
        geometry: Geometry,
        policy: Policy,
        index: int = 0,
        rope: Rope | None = None,
        trace_length: int = 0,
        output: Tensor | None = None,
    ):
        if output is None and policy.needs_output:
            sizes = (geometry.heads, geometry.groups, geometry.head_dim, 8)
            output = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
        ropes, outputs = [rope or Rope(None)], None if output is None else [output]
        self.group = SlotGroup(geometry, policy, [index], ropes, trace_length, outputs=outputs)
        self.geometry, self.policy, self.rope = geometry, policy, self.group.ropes[0]
        self.keys, self.values = self.group.keys[0], self.group.values[0]
        self.positions = self.group.positions[0]
        self.state = {name: t[0] for name, t in self.group.state.items()}
        self.slot_state = {name: t[0] for name, t in self.group.slot_state.items()}
        self.counters = self.group.counters[0]
        times = self.group.eviction_times
        self.eviction_times = None if times is None else times[0]

    lengths = property(lambda self: self.group.rows.lengths)
    seen = property(lambda self: self.group.rows.seen)
    peak = property(lambda self: self.group.rows.peak)

    def reset(self, row: int, budget: Budget | Schedule, seed: int = 0, future: Any = None) -> None:
        schedule = budget
        if isinstance(budget, Budget):
            schedule = self.policy.schedule(budget, 0, 0)
        assert isinstance(schedule, Schedule)
        self.group.reset(row, schedule, seed, None if future is None else [future])

    def schedule(self, row: int) -> Schedule:
        return self.group.rows.schedule(row)

    def view(self, rows: slice) -> View:
        counts = self.group.rows
        return self.group.view(
            0, rows, counts.lengths[rows], counts.seen[rows], counts.prompts[rows]
        )


@torch.no_grad()
def process(
    layer: OneLayer, given: LayerInput, rows: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """One forward: a row's only token is a new one, unless it is the first; more are a prompt."""
    group = layer.group
    prompt = [n > 1 or group.rows.seen[row] == 0 for row, n in zip(rows, counts, strict=True)]
    moves = group.rows.plan(Counts(rows, counts, prompt, [True] * len(rows)))
    if (layer.policy.needs_rope or layer.policy.rerotates) and moves:
        layer.rope.prepare(max(max(m.seen) for m in moves), layer.geometry.device)
    group.begin(moves)
    out = attend(group, 0, given, moves)
    group.finish(moves)
    return out
