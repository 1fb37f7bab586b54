"""From a forward's tokens to attention over the slots of one layer.

The plan (rows.py) says which tokens of which rows go together; the first move of every row has been
opened in all layers at once before the first of them attends (cache.py). What is left to each layer
is to write its keys and values, to attend, and to show its queries to the policy.

Eviction happens when the next token needs a slot. So a head holds the new token while it attends
(attend-then-evict), scores always see exactly the slots that are full, and an evicted token's
eviction time e is the position of the first query that no longer sees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.kernels.attention import SlotMask, slot_attention, slot_attention_with_weights
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.policy import Observation
from kvpolicies.rows import Move
from kvpolicies.slots import SlotGroup, alike
from kvpolicies.transfer import counting


@dataclass(frozen=True)
class LayerInput:
    """What a forward brings to one layer: A rows of T tokens, left-padded."""

    queries: Tensor
    """[A, H, G, T, D], post-RoPE."""
    keys: Tensor
    """[A, H, T, D], post-RoPE."""
    values: Tensor
    """[A, H, T, D]."""
    hidden: Tensor | None
    """[A, T, E], the attention block's input, where the policy wants it."""
    softmax: LogitTransform
    """The model's."""

    def part(self, rows: slice, columns: slice) -> "LayerInput":
        """The tokens of some rows and columns, as views."""
        return LayerInput(
            self.queries[rows, :, :, columns],
            self.keys[rows, :, columns],
            self.values[rows, :, columns],
            None if self.hidden is None else self.hidden[rows, columns],
            self.softmax,
        )


def attend(group: SlotGroup, y: int, given: LayerInput, moves: Sequence[Move]) -> Tensor:
    """Takes a forward's tokens into one layer's slots and attends.

    Args:
        y: the layer's place in the group.
        moves: the plan; its first moves are open.

    Returns:
        [A, H, G, T, D]; zeros where the query is padding.
    """
    group.softmax[y] = given.softmax
    queries = given.queries
    if len(moves) == 1 and moves[0].n == queries.shape[3] and _covers(moves[0], len(queries)):
        return _attend(group, y, given, moves[0])
    out = torch.zeros_like(queries)
    for move in moves:
        if not move.first:
            group.open(move, slice(y, y + 1))
        out[move.batch, :, :, move.columns] = _attend(
            group, y, given.part(move.batch, move.columns), move
        )
    return out


def _covers(move: Move, rows: int) -> bool:
    return move.batch.start == 0 and move.batch.stop == rows


def _attend(group: SlotGroup, y: int, given: LayerInput, move: Move) -> Tensor:
    group.write(y, move, given.keys, given.values)
    filled = max(move.lengths)
    queries = given.queries
    if group.kind:
        keys, values = group.read(y, move.rows, filled)
        queries = queries.to(group.wide)
    else:
        keys, values = (t[y, move.rows, :, :filled] for t in (group.keys, group.values))
    if group.rerotates:
        queries, keys = _by_rank(group, y, queries, keys, move)
    visible = _visible(group, y, move, filled)
    weights = None
    if group.needs_attention:
        out, weights = slot_attention_with_weights(queries, keys, values, visible, given.softmax)
    else:
        out = slot_attention(queries, keys, values, visible, given.softmax)
    if group.kind:
        out = out.to(given.queries.dtype)
    if group.observes:
        step = Observation(given.queries, group.token_positions(move), weights, given.hidden)
        group.observe(y, move, step)
    return out


def attend_fixed(
    group: SlotGroup,
    y: int,
    given: LayerInput,
    slots: Tensor,
    positions: Tensor,
    recorded: dict[str, dict[int, Tensor]],
) -> Tensor:
    """One token of each of the first R rows, written to the slot that a tensor names.

    Nothing here depends on a number of the host: this runs in CUDA graphs and under torch.compile.

    Args:
        slots: [R, 1] int64, where each row's token goes.
        positions: [R, 1] int64, of the tokens.
        recorded: receives what the policy is shown afterwards, by the layer's number in the model.

    Returns:
        [R, H, G, 1, D].
    """
    layer = group.layers[y]
    r = given.keys.shape[0]
    group.put(y, slots, given.keys, given.values)
    keys, values = group.read(y, slice(0, r))
    queries = given.queries.to(group.wide) if group.kind else given.queries
    visible = SlotMask(slots)
    if group.span is not None:
        visible = SlotMask(slots, positions - group.span + 1, group.positions[y, :r, 0])
    group.softmax[y] = given.softmax
    if group.observes:
        recorded["queries"][layer] = given.queries
        if given.hidden is not None:
            recorded["hidden"][layer] = given.hidden
    if not group.needs_attention:
        out = slot_attention(queries, keys, values, visible, given.softmax)
        return out.to(given.queries.dtype)
    out, weights = slot_attention_with_weights(queries, keys, values, visible, given.softmax)
    recorded["weights"][layer] = weights
    return out.to(given.queries.dtype)


def _visible(group: SlotGroup, y: int, move: Move, filled: int) -> SlotMask:
    """The i-th new query sees the old slots and the first i + 1 new ones, within the span.

    By slot, not by position: old tokens are all earlier, new ones were appended in order; hence
    one limit for all heads, though each holds other positions.
    """
    last, device = None, group.geometry.device
    if not alike(move.before):
        last = counting(move.before, move.n, device)
    elif move.n > 1:
        last = counting(move.before[:1], move.n, device)
    if group.span is None:
        return SlotMask(last)
    first = group.token_positions(move) - group.span + 1
    return SlotMask(last, first, group.positions[y, move.rows, 0, :filled])


def _by_rank(
    group: SlotGroup, y: int, queries: Tensor, keys: Tensor, move: Move
) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated to their ranks in the cache; keys are stored before RoPE."""
    rope, device = group.ropes[y], group.geometry.device
    positions = group.positions[y, move.rows, :, : keys.shape[2]]
    order = positions.masked_fill(positions < 0, torch.iinfo(torch.int32).max)
    ranks = order.argsort(dim=-1).argsort(dim=-1)
    raw = rope.unrotate(queries, group.token_positions(move))
    own = counting(move.before, move.n, device)
    return rope.rotate(raw, own).to(queries.dtype), rope.rotate(keys, ranks).to(queries.dtype)
