"""The exact fixed-budget KV cache: a `transformers.Cache` whose layers hold slots.

    cache = FixedBudgetCache(model, policy="beacon", budget=1024)
    with kvpolicies.attach(model, cache):
        model.generate(**inputs, past_key_values=cache)      # `cache=` from transformers 5.24

`kvpolicies.generate` does this by itself. Memory is allocated once, when the batch size is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpolicies import room
from kvpolicies.admission import scheduled_layers
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.layer_shares import mean
from kvpolicies.passing import PassingLayer
from kvpolicies.policy import Geometry, Policy, Schedule, Schedules, each
from kvpolicies.rows import Counts, Move
from kvpolicies.sliding import Sliding, sliding_budget
from kvpolicies.slots import SlotGroup
from kvpolicies.step import LayerInput, attend

# Attention weights, where a policy asks for them, are made for so many (query, slot) pairs a row.
WEIGHTS_A_ROW = 1 << 22


@dataclass(frozen=True)
class Forward:
    """The forward that is under way: planned once, read by every layer."""

    moves: list[list[Move]]
    """The plan of each group of layers."""
    scheduled: bool = True
    """Whether kvpolicies' own loop began it; else the model's first layer does."""
    fixed: Any = None
    """A decode step of fixed shapes (fixed.py), if that runs it."""


class FixedBudgetCache(Cache):
    """At most `budget.total` KV pairs a head, whatever the sequence's length.

    Args:
        model: the transformers model (its sizes are read; nothing is changed).
        policy: a `Policy`, or its spec such as `"beacon(n_beacon=8)"`.
        budget: one `Budget` for all rows, an int or text such as `"1024"`, or one Budget a prompt
            of the batch. A paper's own rule (`faithful=True`) depends on prompt and limit: give it
            `policy.schedule(budget.for_prompt(n), n, max_new_tokens)` for each prompt of n tokens;
            so does a budget with `sinks="prompt"`. In such a list a tuple of schedules is
            one prompt's: one for each layer that is evicted.
        request_ids: what identifies each prompt of the batch in any other (default: 0 for all);
            policies that draw random numbers seed them with it, as `generate` does.
        slots: slots to allocate a head; default the largest budget. Fewer suffice when sequences
            are known to be shorter.
        max_length: tokens of the longest sequence, where something must be allocated for all of
            them: a trace, or a policy that keeps every query (0 = not known).
        trace: record eviction times.
        kv_dtype: what keys and values are stored in (budget.KV_DTYPES), where `budget` is made of
            schedules, which do not say.

    With `num_return_sequences=n` each prompt's budget and id hold for its n neighbouring rows.

    Raises:
        ValueError: for a model whose attention cannot work here, by name.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy | str,
        budget: Budget | Schedule | str | int | Sequence[Budget | Schedules],
        *,
        request_ids: Sequence[int] | None = None,
        slots: int | None = None,
        max_length: int = 0,
        trace: bool = False,
        kv_dtype: str = "auto",
    ):
        from kvpolicies.architecture import find_outputs, find_ropes, inspect_model
        from kvpolicies.guard import refuse_compiled
        from kvpolicies.registry import resolve

        refuse_compiled(model)
        self.policy = resolve(policy)
        self.shape = inspect_model(model, self.policy)
        self.policy.check_model(model)
        self.ropes = find_ropes(model)
        self.outputs = find_outputs(model) if self.policy.needs_output else None
        self.kv_dtype = kv_dtype
        one = isinstance(budget, str | int | Budget | Schedule)
        self.schedules = [self._schedule(b) for b in ([budget] if one else list(budget))]
        if not self.schedules:
            raise UserError("FixedBudgetCache: no budget given")
        self.request_ids = [0] if request_ids is None else [int(i) for i in request_ids]
        most = max(s.capacity for given in self.schedules for s in each(given))
        self.slots = most if slots is None else slots
        if trace and max_length < 1:
            raise UserError("FixedBudgetCache: a trace needs max_length, the longest sequence")
        if trace and self.policy.rerotates:
            raise UserError(
                f"policy {self.policy}: eviction times do not tell how keys are re-rotated, so "
                "that its trace could not be replayed; record none"
            )
        if self.kv_dtype == "int4" and self.shape.head_dim % 2:
            raise UserError(
                "kv_dtype int4 stores two numbers a byte, and the head size is "
                f"{self.shape.head_dim}; use int8"
            )
        self.max_length, self.trace_length = max_length, max_length if trace else 0
        self.groups: list[SlotGroup] = []
        # By layer: its group's number, and its index in the group.
        self.layer_index: list[tuple[int, int]] = []
        self.forward: Forward | None = None
        # Columns of the prompt that `model.generate` was given, while it runs; None = not known.
        self.prompt_columns: int | None = None
        # Token ids that forwards of transformers' own loop brought; None = some are not known.
        self.history: list[Tensor] | None = []
        self._columns = 0
        self._passing = [PassingLayer() for _ in range(self.shape.layers)]
        super().__init__(layers=[*self._passing])

    def _schedule(self, budget: Budget | Schedules | str | int) -> Schedules:
        if isinstance(budget, tuple) and len(budget) != self.shape.evicted:
            raise UserError(
                f"FixedBudgetCache: {len(budget)} schedules given for {self.shape.evicted} layers"
            )
        if isinstance(budget, Schedule | tuple):
            return budget
        budget = Budget.parse(budget)
        if budget.kv_dtype != "auto":
            self.kv_dtype = budget.kv_dtype  # all rows are stored alike
        if self.policy.own_rule or budget.keeps_prompt:
            raise UserError(
                f"FixedBudgetCache: what {self.policy} holds follows from prompt and limit: give "
                "it policy.schedule(budget.for_prompt(n), n, max_new_tokens) for each prompt of n "
                "tokens"
            )
        return scheduled_layers(self.policy, budget, 0, 0, self.shape.evicted)

    def _of_layer(self, schedules: Schedules, layer: int) -> Schedule:
        """What a sequence's schedule is in one of the layers that are evicted."""
        if isinstance(schedules, Schedule):
            return schedules
        return schedules[self.shape.full.index(layer)]

    def set_attached(self, attached: bool) -> None:
        """Called by `attach`: without it, new keys would go nowhere."""
        for layer in self._passing:
            layer.attached, layer.handed_over = attached, False

    def take_over(self, layer: int, heads: int) -> None:
        """Called when a layer attends: its new keys must have come through `update`, just now.

        Raises:
            UserError: if they did not, for then the model holds another cache, or none; if they
                are of other KV heads than the cache's, as an unknown way of spreading them makes.
        """
        if heads != self.shape.heads:
            raise UserError(
                f"layer {layer} has {heads} KV heads in this process, the cache "
                f"{self.shape.heads}: the model's tensor-parallel plan is not supported"
            )
        if not self._passing[layer].handed_over:
            raise UserError(
                "the model was called without the attached cache, or with another one: hand it to "
                "the call (past_key_values=cache; cache=cache from transformers 5.24)"
            )
        self._passing[layer].handed_over = False

    def allocate(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates all layers for `rows` sequences, which `start` begins.

        Raises:
            UserError: for more than the device has, before any of it is allocated.
        """
        if device.type != "meta":
            self._check_room(rows, dtype, device)
        s = self.shape
        geometry = Geometry(
            rows, s.heads, s.groups, self.slots, s.head_dim, dtype, device, self.max_length,
            s.first_head,
        )  # fmt: skip
        # Layers whose rows hold equally many slots: of one span, and of one share of the budget.
        groups: dict[tuple[int | None, tuple[Schedule, ...]], list[int]] = {}
        uneven = any(isinstance(given, tuple) for given in self.schedules)
        for i, span in enumerate(s.spans):
            shares = uneven and span is None
            schedules = [self._of_layer(given, i) for given in self.schedules] if shares else []
            groups.setdefault((span, tuple(schedules)), []).append(i)
        self.groups, self.layer_index = [], [(0, 0)] * s.layers
        for (span, schedules), layers in groups.items():
            own, policy = geometry, self.policy
            if span is not None:
                most = sliding_budget(span).total
                own = replace(geometry, slots=min(most, self.max_length or most))
                policy = Sliding()
            elif schedules:
                own = replace(geometry, slots=min(self.slots, max(x.capacity for x in schedules)))
            for y, layer in enumerate(layers):
                self.layer_index[layer] = (len(self.groups), y)
            ropes, outputs = [self.ropes[i] for i in layers], None
            if self.outputs and span is None:
                outputs = [self.outputs[i] for i in layers]
            self.groups.append(
                SlotGroup(
                    *(own, policy, layers, ropes),
                    *(self.trace_length, span, outputs, self.kv_dtype),
                )
            )
        if self.max_length and device.type != "meta":
            self._prepare_ropes(self.max_length)  # what cannot be rotated so far is refused now

    def _check_room(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        what = f"a cache of {rows:,} rows of {self.slots:,} slots a KV head"
        instead = "lower batch_size, the budget, or the number of new tokens"
        try:
            self.allocate(1, dtype, torch.device("meta"))
        except (RuntimeError, OverflowError, TypeError):  # sizes that no number of torch's holds
            raise UserError(f"{what} fits no memory: {instead}") from None
        room.check(rows * (self.cache_bytes() + self.state_bytes()), what, instead, device)

    def _a_row(self, rows: int, given: list[Any], what: str) -> list[Any]:
        """One value a row, of one for all or one a prompt, whose rows are neighbours."""
        if rows % len(given):
            raise UserError(f"FixedBudgetCache: {len(given)} {what} given for a batch of {rows}")
        return [value for value in given for _ in range(rows // len(given))]

    def _prepare_ropes(self, length: int) -> None:
        if self.policy.needs_rope or self.policy.rerotates:
            for rope in set(self.ropes):
                rope.prepare(length, self.groups[0].geometry.device)

    def allocate_once(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates for a batch of so many rows and starts them, if nothing is allocated yet.

        Raises:
            UserError: if the cache holds another number of rows.
        """
        if not self.groups:
            schedules = self._a_row(rows, self.schedules, "budgets")
            ids = self._a_row(rows, self.request_ids, "request_ids")
            self.allocate(rows, dtype, device)
            for row in range(rows):
                self.start(row, schedules[row], ids[row])
        if rows != self.rows:
            raise UserError(
                f"the cache holds {self.rows} rows, the batch has {rows}; make a new "
                "FixedBudgetCache for a batch of another size"
            )

    @property
    def columns(self) -> int:
        """Columns of tokens that came in so far, padding and those under way included."""
        return self._passing[0].columns

    @property
    def rows(self) -> int:
        """Rows that are allocated; 0 before."""
        return self.groups[0].geometry.rows if self.groups else 0

    def start(
        self, row: int, schedule: Schedules, seed: int = 0, futures: Sequence[Any] | None = None
    ) -> None:
        """Empties a row and gives it to a new sequence, identified by `seed` in any batch.

        `futures` is the recording of the sequence's full run, one a layer (recording.py).
        """
        for group in self.groups:
            if group.span is not None:
                own = group.policy.schedule(sliding_budget(group.span), 0, 0)
            else:
                own = self._of_layer(schedule, group.layers[0])
            group.reset(row, own, seed, futures and [futures[i] for i in group.layers])

    def move_row(self, source: int, destination: int) -> None:
        """Moves a sequence to a row that nobody uses."""
        for group in self.groups:
            group.move_row(source, destination)

    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges the sequences of two rows."""
        for group in self.groups:
            group.swap(one, other)

    def forget_future(self, row: int) -> None:
        """Lets go of the recording that a row's sequence was given."""
        for group in self.groups:
            group.forget_future(row)

    def reset(self) -> None:
        """Starts every row anew; the memory stays."""
        super().reset()
        self.forward, self.history, self._columns = None, [], 0
        for group in self.groups:
            for row in range(self.rows):
                group.reset(row, group.rows.schedule(row), group.rows.seeds[row])

    def begin(self, counts: Counts, *, scheduled: bool = False, fixed: Any = None) -> None:
        """Plans a forward, and opens the first move of every row in all layers.

        Args:
            counts: what the forward brings. scheduled: our own loop runs it, or, `fixed`, its
                decode step of fixed shapes.

        Raises:
            UserError: if a row outgrows what it holds under a policy that evicts nothing.
        """
        moves = [group.rows.plan(counts, self._most(group, counts)) for group in self.groups]
        if self.policy.needs_rope or self.policy.rerotates:
            longest = max((max(move.seen) for move in moves[0]), default=0)
            self._prepare_ropes(longest)
        for group, plan in zip(self.groups, moves, strict=True):
            group.begin(plan)
        self.forward = Forward(moves, scheduled, fixed)

    def attend(self, layer: int, given: LayerInput) -> Tensor:
        """Takes the forward's tokens into one layer and attends: see `step.attend`."""
        assert self.forward is not None
        group, y = self.layer_index[layer]
        return attend(self.groups[group], y, given, self.forward.moves[group])

    def abandon(self) -> None:
        """A new forward comes, of transformers' own loop: was the last one refused before it began?

        Raises:
            UserError: if it failed half-way, for then some layers have taken its tokens in.
        """
        if self.forward is not None:
            raise UserError(
                "FixedBudgetCache: the last forward failed half-way, so that layers hold different "
                "tokens; call cache.reset()"
            )
        for layer in self._passing:
            layer.columns, layer.handed_over = self._columns, False

    def finish(self) -> None:
        """The forward has passed the last layer: its tokens count."""
        assert self.forward is not None
        for group, plan in zip(self.groups, self.forward.moves, strict=True):
            group.finish(plan)
        self.forward, self._columns = None, self.columns

    def _most(self, group: SlotGroup, counts: Counts) -> list[int] | None:
        if not group.policy.needs_attention:
            return None
        g, rows = group.geometry, group.rows
        heads = g.heads * g.groups
        return [max(1, WEIGHTS_A_ROW // (heads * rows.schedule(r).capacity)) for r in counts.rows]

    def next_step(self, row: int, remaining: int, most: int | None = None) -> int:
        """Tokens of a prompt to bring in the row's next forward, `remaining` still to come.

        Args:
            most: a bound for policies that evict nothing. Others keep the steps of their budget,
                so that no forward brings more than the row can hold.
        """
        # Of layers that share unevenly, what the largest takes at once: the others take more moves.
        free = max(group.rows.room(row, prompt=True)[1] for group in self._evicting)
        return min(remaining, free if most is None or self.policy.evicts else min(free, most))

    def max_slots(self, row: int, tokens: int | None = None) -> int:
        """The most slots that any head has held for the row's sequence.

        Of layers that share unevenly the mean, rounded up: above the budget if their sum is.
        Layers with a sliding window aside, unless there are no others: see sliding.py.

        Args:
            tokens: no more than so many, where some were processed that do not count.
        """
        slots = self.layer_slots(row)
        return mean(slots if tokens is None else [min(n, tokens) for n in slots])

    def layer_slots(self, row: int) -> list[int]:
        """The most slots that any head has held for the row's sequence, by layer that is evicted,
        in the model's order."""
        peaks = {y: g.rows.peak[row] for g in self._evicting for y in g.layers}
        return [peaks[y] for y in sorted(peaks)]

    @property
    def _evicting(self) -> list[SlotGroup]:
        return [group for group in self.groups if group.span is None] or self.groups[:1]

    @property
    def evicting(self) -> SlotGroup:
        """Layers that the policy evicts: of the full ones, or, where all slide, those. What rows
        have seen is the same in all; where layers share unevenly, how much they hold is not."""
        return self._evicting[0]

    def times(self, row: int, n: int) -> Tensor:
        """Eviction times [layers, H, n] int32 of the row's first n tokens, if they are recorded."""
        return torch.stack([self.groups[g].times(y, row, n) for g, y in self.layer_index])

    def cache_bytes(self) -> int:
        """Bytes of keys, values (codes and scales) and positions of one row, all layers."""
        return self._bytes_a_row(
            lambda g: [t[:, 0] for t in (g.keys, g.values, *g.scales, g.positions)]
        )

    def state_bytes(self) -> int:
        """Bytes of the policy's own tensors of one row, all layers."""
        return self._bytes_a_row(
            lambda g: [
                *(t[:, 0] for t in g.slot_state.values()),
                *(t[:, 0] for t in g.state.values()),
            ]
        )

    def _bytes_a_row(self, tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for g in self.groups for t in tensors(g))

    def check_scores(self) -> None:
        """Raises UserError if a policy produced NaN (waits for the device)."""
        for group in self.groups:
            group.check_scores()
