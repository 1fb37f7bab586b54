"""A request's page: all that is kept of one row and one layer, as bytes that vLLM owns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from kvpolicies.policy import Geometry, Policy
from kvpolicies.rope import Rope
from kvpolicies.rows import Rows
from kvpolicies.slots import SlotGroup

ALIGN = 64
"""Bytes that each tensor of a page begins at a multiple of."""


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in a page."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """In bytes."""

    def of(self, pages: Tensor) -> Tensor:
        """The tensor [P, *shape] of all pages [P, bytes], as a view."""
        size = prod(self.shape) * self.dtype.itemsize
        flat = pages[:, self.offset : self.offset + size].view(self.dtype)
        return flat.unflatten(1, self.shape) if self.shape else flat[:, 0]


def places(policy: Policy, geometry: Geometry) -> tuple[list[Place], int]:
    """Places in a page of keys, values, positions, slot state and state, and the page's bytes.

    The code that allocates them says what they are: a group of one row, without storage.
    """
    one = replace(geometry, rows=1, device=torch.device("meta"))
    group = SlotGroup(one, policy, [0], [Rope(None)])
    found, offset = [], 0
    for tensor in (*group.stored, *group.state.values()):
        found.append(Place(tuple(tensor.shape[2:]), tensor.dtype, offset))
        offset += -(-tensor[0, 0].numel() * tensor.itemsize // ALIGN) * ALIGN
    return found, offset


class PagedSlots(SlotGroup):
    """The slots of one layer, of which every tensor is a view into vLLM's pages.

    Args:
        pages: [P, bytes] int8; page p is row p.
        geometry: of the layer; rows and device are the pages'.
        rows: the counts, which all layers share and the planner keeps.
    """

    def __init__(
        self, pages: Tensor, geometry: Geometry, policy: Policy, layer: int, rope: Rope, rows: Rows
    ):
        geometry = replace(geometry, rows=len(pages), device=torch.device("meta"))
        super().__init__(geometry, policy, [layer], [rope])
        self.geometry, self.rows = replace(geometry, device=pages.device), rows
        views = [place.of(pages)[None] for place in places(policy, geometry)[0]]
        self.keys, self.values, self.positions, *others = views
        names = [(self.slot_state, name) for name in self.slot_state]
        names += [(self.state, name) for name in self.state]
        for (owner, name), view in zip(names, others, strict=True):
            owner[name] = view
        self.bad_scores = torch.zeros(1, dtype=torch.bool, device=pages.device)

    def begin_sequences(self, rows: Sequence[int]) -> None:
        """Empties pages that new sequences were given; the planner has counted them already."""
        for row in rows:
            self.clear(row)
