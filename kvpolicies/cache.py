"""The exact fixed-budget KV cache: a `transformers.Cache` whose layers hold slots.

    cache = FixedBudgetCache(model, policy="beacon", budget=1024)
    with kvpolicies.attach(model, cache):
        model.generate(**inputs, past_key_values=cache)      # `cache=` from transformers 5.24

`kvpolicies.generate` does this by itself. Memory is allocated once, when the batch size is known.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpolicies.budget import Budget, Grant
from kvpolicies.errors import UserError
from kvpolicies.layer import SlotLayer
from kvpolicies.policy import Geometry, Policy
from kvpolicies.sliding import Sliding, sliding_budget
from kvpolicies.store import SlotStore


class _Passing(CacheLayerMixin):
    """What transformers sees of a layer: hands new keys through to our attention function."""

    is_sliding = False
    is_croppable = False
    attached = False

    def __init__(self) -> None:
        super().__init__()
        self.columns = 0  # tokens seen, padding included
        self.handed_over = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.attached:
            raise UserError(
                "FixedBudgetCache used outside of kvpolicies.attach: write "
                "`with kvpolicies.attach(model, cache): model.generate(...)`"
            )
        self.is_initialized = self.handed_over = True
        self.columns += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1  # no limit on a sequence: slots are reused

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.columns = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UserError("FixedBudgetCache: beam search is not supported; use num_beams=1")


class FixedBudgetCache(Cache):
    """At most `budget.total` KV pairs a head, whatever the sequence's length.

    Args:
        model: the transformers model (its sizes are read; nothing is changed).
        policy: a `Policy`, or its spec such as `"beacon(n_beacon=8)"`.
        budget: one `Budget` for all rows, an int or text such as `"1024"`, or one Budget a row. A
            paper's own rule (`faithful=True`) is in force where `policy.grant(...)` made it.
        slots: slots to allocate a head; default the largest budget. Fewer suffice when sequences
            are known to be shorter.
        max_length: tokens of the longest sequence, where something must be allocated for all of
            them: a trace, or a policy that keeps every query (0 = not known).
        trace: record eviction times.

    Raises:
        ValueError: for a model whose attention cannot work here, by name.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy | str,
        budget: Budget | str | int | Sequence[Budget],
        *,
        slots: int | None = None,
        max_length: int = 0,
        trace: bool = False,
    ):
        from kvpolicies.architecture import find_ropes, inspect_model
        from kvpolicies.registry import resolve

        self.policy = resolve(policy)
        self.shape = inspect_model(model, self.policy)
        self.policy.check_model(model)
        self.ropes = find_ropes(model)
        one = isinstance(budget, str | int | Budget)
        self.budgets: list[Budget] = [Budget.parse(budget)] if one else list(budget)
        if not self.budgets:
            raise UserError("FixedBudgetCache: no budget given")
        own_rule = self.policy.own_rule
        if own_rule and not all(isinstance(b, Grant) for b in self.budgets):
            raise UserError(
                f"FixedBudgetCache: what {self.policy} holds follows from prompt and limit: "
                "give it policy.grant(budget, prompt_tokens, max_new_tokens) for each row"
            )
        self.slots = max(b.total for b in self.budgets) if slots is None else slots
        if trace and max_length < 1:
            raise UserError("FixedBudgetCache: a trace needs max_length, the longest sequence")
        self.max_length, self.trace_length = max_length, max_length if trace else 0
        self.slot_layers: list[SlotLayer] = []
        self.stores: list[SlotStore] = []
        # (rows, real tokens a row) of the next forward, when kvpolicies' own loop runs it.
        self.scheduled: tuple[list[int], list[int]] | None = None
        # A decode step of fixed shapes, while it runs (fixed.py).
        self.fixed: Any = None
        self._passing = [_Passing() for _ in range(self.shape.layers)]
        super().__init__(layers=[*self._passing])

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
        """Allocates all layers for `rows` sequences and starts every row."""
        s = self.shape
        geometry = Geometry(
            rows, s.heads, s.groups, self.slots, s.head_dim, dtype, device, self.max_length,
            s.first_head,
        )  # fmt: skip
        self.slot_layers, self.stores = [], []
        store_of: dict[int | None, SlotStore] = {}
        for i, (rope, span) in enumerate(zip(self.ropes, s.spans, strict=True)):
            own, policy = geometry, self.policy
            if span is not None:
                most = sliding_budget(span).total
                own = replace(geometry, slots=min(most, self.max_length or most))
                policy = Sliding()
            if span not in store_of:
                store_of[span] = SlotStore(s.spans.count(span), own, policy, self.trace_length)
            layer = SlotLayer(own, policy, i, rope, self.trace_length, span, store_of[span])
            self.slot_layers.append(layer)
        self.stores = list(store_of.values())
        rotates = self.policy.needs_rope or self.policy.rerotates
        if self.max_length and rotates and device.type != "meta":
            for rope in self.ropes:  # what cannot be rotated so far is refused now, not on the way
                rope.prepare(self.max_length, device)
        for row in range(rows):
            self.start(row, self.budgets[row % len(self.budgets)], seed=row)

    def start(
        self,
        row: int,
        budget: Budget,
        seed: int = 0,
        futures: Sequence[Any] | None = None,
        prompt: int = 0,
    ) -> None:
        """Empties a row and gives it to a new sequence, identified by `seed` in any batch.

        `futures` is the recording of the sequence's full run, one a layer (recording.py), `prompt`
        its prompt's length (0 = not known beforehand).
        """
        for i, layer in enumerate(self.slot_layers):
            own = budget if layer.span is None else sliding_budget(layer.span)
            layer.reset(row, own, seed, futures[i] if futures else None, prompt)

    def move_row(self, source: int, destination: int) -> None:
        """Moves a sequence to a row that nobody uses."""
        for layer in self.slot_layers:
            layer.move_row(source, destination)

    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges the sequences of two rows."""
        for layer in self.slot_layers:
            layer.swap_rows(one, other)

    def reset(self) -> None:
        """Starts every row anew; the memory stays."""
        super().reset()
        self.scheduled = None
        for layer in self.slot_layers:
            for row in range(layer.geometry.rows):
                layer.reset(row, layer.budget(row), layer.seeds[row])

    def next_step(self, row: int, remaining: int, most: int | None = None) -> int:
        """Tokens of a prompt to bring in the row's next forward, `remaining` still to come.

        Args:
            most: a bound for policies that evict nothing. Others keep the steps of their budget:
                what goes, and what some have seen by then, follows from a step's size.
        """
        n = self._evicting[0].room(row, remaining)[1]
        return n if most is None or self.policy.evicts else min(n, most)

    def make_room(self, rows: int) -> None:
        """Makes room for one more token of the first `rows` rows, in all layers, where it lacks."""
        for store in self.stores:
            layer = store.members[0]
            store.make_room(slice(0, rows), [layer.room(row, 1)[0] for row in range(rows)])

    def max_slots(self, row: int) -> int:
        """The most slots that any head has held for the row's sequence.

        Layers with a sliding window aside, unless there are no others: see sliding.py.
        """
        return max(layer.peak[row] for layer in self._evicting)

    @property
    def _evicting(self) -> list[SlotLayer]:
        return [layer for layer in self.slot_layers if layer.span is None] or self.slot_layers

    def cache_bytes(self) -> int:
        """Bytes of keys, values and positions of one row, all layers."""
        return self._bytes_a_row(lambda y: [y.keys, y.values, y.positions])

    def state_bytes(self) -> int:
        """Bytes of the policy's own tensors of one row, all layers."""
        return self._bytes_a_row(lambda y: [*y.state.values(), *y.slot_state.values()])

    def _bytes_a_row(self, tensors: Any) -> int:
        return sum(
            t[:1].numel() * t.element_size() for layer in self.slot_layers for t in tensors(layer)
        )

    def check_scores(self) -> None:
        """Raises UserError if a policy produced NaN (waits for the device)."""
        for store in self.stores:
            store.check_scores()
