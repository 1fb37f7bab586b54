"""From a forward's tokens to attention over the cache: what happens to a token, in order.

A forward brings T tokens a row. They are processed in steps whose sizes follow from the row's own
length and budget alone, so that it makes no difference which rows share a batch, whether a prompt
comes whole or step by step, or who runs the loop:

    make room (evict, if the row is full) -> append -> attend -> let the policy observe

Eviction is lazy: it happens when the next token needs a slot. So a head holds the new token while
it attends (attend-then-evict), scores always see exactly `total` filled slots, and an evicted
token's eviction time e is the position of the first query that no longer sees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.kernels.attention import Visible, slot_attention, slot_attention_with_weights
from kvpolicies.kernels.softmax import Softmax
from kvpolicies.layer import SlotLayer
from kvpolicies.policy import Step, View
from kvpolicies.store import runs

# Attention weights, where a policy asks for them, are made for so many (query, slot) pairs a row.
WEIGHTS_A_ROW = 1 << 22


@dataclass(frozen=True)
class Tokens:
    """What a forward brings to one layer: A rows of T tokens, left-padded."""

    queries: Tensor  # [A, H, G, T, D]
    keys: Tensor  # [A, H, T, D]
    values: Tensor  # [A, H, T, D]
    inputs: Tensor | None  # [A, T, E]
    softmax: Softmax

    def part(self, rows: slice, columns: slice) -> "Tokens":
        """The tokens of some rows and columns, as views."""
        return Tokens(
            self.queries[rows, :, :, columns],
            self.keys[rows, :, columns],
            self.values[rows, :, columns],
            None if self.inputs is None else self.inputs[rows, columns],
            self.softmax,
        )


@torch.no_grad()
def process(layer: SlotLayer, tokens: Tokens, rows: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Takes a forward's tokens into the cache and attends.

    Args:
        rows: row i of `tokens` belongs to row rows[i] of the cache.
        counts: only the last counts[i] tokens of row i are real, the others are padding.

    Returns:
        [A, H, G, T, D], without gradient; zeros where the query is padding.
    """
    layer.softmax = tokens.softmax
    out = torch.zeros_like(tokens.queries)
    width = out.shape[3]
    left = list(counts)
    for row, n in zip(rows, counts, strict=True):
        layer.expect(row, n)
    while any(left):
        steps = [_plan(layer, row, n) for row, n in zip(rows, left, strict=True)]
        # Rows that are neighbours in the cache and do the same are one call.
        alike = [(row - i, width - left[i], steps[i][1]) for i, row in enumerate(rows)]
        for first, last, (shift, offset, n) in runs(alike):
            if n:
                columns = slice(offset, offset + n)
                part = tokens.part(slice(first, last), columns)
                here = slice(first + shift, last + shift)
                drops = [n_drop for n_drop, _ in steps[first:last]]
                out[first:last, :, :, columns] = _step(layer, part, here, drops)
        left = [a - n for a, (_, n) in zip(left, steps, strict=True)]
    return out


def _plan(layer: SlotLayer, row: int, remaining: int) -> tuple[int, int]:
    """(slots to free, tokens) of the row's next step; (0, 0) when nothing remains."""
    if remaining == 0:
        return 0, 0
    n_drop, n = layer.room(row, remaining)
    if layer.policy.needs_attention:
        g = layer.geometry
        n = min(n, max(1, WEIGHTS_A_ROW // (g.heads * g.groups * layer.budget(row).total)))
    return n_drop, n


def _step(layer: SlotLayer, tokens: Tokens, rows: slice, drops: list[int]) -> Tensor:
    n = tokens.keys.shape[2]
    layer.make_room(rows, drops)
    before = layer.lengths[rows]
    positions = layer.token_positions(rows, n)
    if layer.policy.needs_rope or layer.policy.rerotates:
        layer.rope.prepare(max(layer.seen[rows]) + n, positions.device)
    layer.append(tokens.keys, tokens.values, rows)
    view = layer.view(rows)
    visible = _visible(layer, view, before, positions)
    queries, keys = tokens.queries, view.keys
    if layer.policy.rerotates:
        queries, keys = _by_rank(view, queries, positions, layer.counting(before, n))
    if layer.policy.needs_attention:
        out, weights = slot_attention_with_weights(
            queries, keys, view.values, visible, layer.softmax
        )
    else:
        out, weights = slot_attention(queries, keys, view.values, visible, layer.softmax), None
    if layer.policy.observes:
        layer.policy.observe(view, Step(tokens.queries, positions, weights, tokens.inputs))
    return out


def _visible(layer: SlotLayer, view: View, before: list[int], positions: Tensor) -> Visible:
    """The i-th new query sees the old slots and the first i + 1 new ones, within the layer's span.

    By slot, not by position: old tokens are all earlier, new ones were appended in order; hence
    one limit for all heads, though each holds other positions.
    """
    n, last = positions.shape[1], None
    if len(set(before)) > 1:
        last = layer.counting(before, n)
    elif n > 1:
        last = layer.counting(before[:1], n)
    if layer.span is None:
        return Visible(last)
    return Visible(last, positions - layer.span + 1, view.positions[:, 0])


def _by_rank(view: View, queries: Tensor, positions: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated to their ranks in the cache; keys are stored before RoPE."""
    order = view.positions.masked_fill(view.positions < 0, torch.iinfo(torch.int32).max)
    ranks = order.argsort(dim=-1).argsort(dim=-1)
    raw = view.rope.unrotate(queries, positions)
    keys = view.rope.rotate(view.keys, ranks)
    return view.rope.rotate(raw, rank).to(queries.dtype), keys.to(queries.dtype)
