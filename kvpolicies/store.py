"""The tensors of layers that hold the same slots, and the eviction of all these layers at once.

Which slots go is each layer's and each head's own affair; how many, and when, follows from counts
that all layers share. So one call chooses the victims of every layer and one moves them: a decode
step that frees a single slot would otherwise spend more time on calls than on work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.eviction import choose_victims
from kvpolicies.kernels.compact import compact
from kvpolicies.policy import Geometry, Policy
from kvpolicies.trace import NEVER
from kvpolicies.transfer import on_device

if TYPE_CHECKING:
    from kvpolicies.layer import SlotLayer

Key = TypeVar("Key")


class SlotStore:
    """Keys, values and positions of Y layers, allocated once.

    Attributes:
        keys, values: [Y, B, H, C, D]. positions: [Y, B, H, C] int32, -1 = empty.
        slot_state: the policy's slot-aligned tensors [Y, B, H, C].
        eviction_times: [Y, B, H, T] int32 when a trace of T positions is recorded.
        bad_scores: [Y] bool, set on the device when a score is NaN; the host reads it when it waits
            anyway.
    """

    def __init__(self, layers: int, geometry: Geometry, policy: Policy, trace_length: int = 0):
        g = geometry
        shape = (layers, g.rows, g.heads, g.slots)
        self.policy, self.device = policy, g.device
        self.keys = torch.zeros(*shape, g.head_dim, dtype=g.dtype, device=g.device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=g.device)
        self.slot_state = {
            name: torch.zeros(shape, dtype=dtype, device=g.device)
            for name, dtype in policy.slot_tensors.items()
        }
        self.eviction_times: Tensor | None = None
        if trace_length:
            times = (*shape[:3], trace_length)
            self.eviction_times = torch.full(times, NEVER, dtype=torch.int32, device=g.device)
        self.bad_scores = torch.zeros(layers, dtype=torch.bool, device=g.device)
        self.members: list[SlotLayer] = []

    @property
    def stored(self) -> list[Tensor]:
        """All that moves with a slot: [Y, B, H, C, ...]."""
        return [self.keys, self.values, self.positions, *self.slot_state.values()]

    def make_room(self, rows: slice, drops: Sequence[int], members: slice = slice(None)) -> None:
        """Evicts `drops[i]` slots of every head of each row; 0 leaves a row alone.

        Args:
            members: which layers, all of the same lengths.
        """
        lengths = self.members[members][0].lengths
        todo = [(n, lengths[rows.start + i] if n else 0) for i, n in enumerate(drops)]
        for first, last, (n_drop, length) in runs(todo):
            if n_drop:
                here = slice(rows.start + first, rows.start + last)
                self._evict(members, here, n_drop, length)

    def _evict(self, members: slice, rows: slice, n_drop: int, length: int) -> None:
        layers = self.members[members]
        views = [layer.view(rows) for layer in layers]
        scores = _stacked([self.policy.scores(view) for view in views])  # [y, b, H, L]
        self.bad_scores[members] |= scores.isnan().flatten(1).any(dim=1)
        if self.device.type == "cpu":
            self.check_scores()
        positions, view = self.positions[members, rows, :, :length], views[0]
        parts = [
            choose_victims(
                scores[:, a:b],
                positions[:, a:b],
                view.newest[a:b],
                *self.policy.protection(budget, n_drop),
                n_drop,
            )
            for a, b, budget in runs(view.budgets)
        ]
        victims = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.eviction_times is not None:
            gone = positions.gather(-1, victims).long()
            when = on_device(view.seen, gone.device).to(torch.int32)
            times = when[:, None, None].expand(gone.shape)
            self.eviction_times[members, rows].scatter_(-1, gone, times)
        compact([t[members, rows] for t in self.stored], victims, length)
        self.positions[members, rows, :, length - n_drop : length] = -1
        for layer in layers:
            layer.shrink(rows, n_drop)

    def check_scores(self) -> None:
        """Raises UserError if any score so far was NaN (waits for the device)."""
        if bool(self.bad_scores.any()):
            layer = self.members[int(self.bad_scores.nonzero()[0])].index
            raise UserError(
                f"policy {self.policy}: NaN in a score at layer {layer}; the model's queries or "
                "keys are not finite (try a wider dtype such as bfloat16 or float32)"
            )


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def runs(items: Iterable[Key]) -> Iterator[tuple[int, int, Key]]:
    """Maximal runs of equal neighbours: (first, last + 1, item). Runs are slices, hence views."""
    start = 0
    for key, group in groupby(items):
        stop = start + sum(1 for _ in group)
        yield start, stop, key
        start = stop
