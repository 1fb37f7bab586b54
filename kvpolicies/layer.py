"""One layer of the cache: fixed slots, each KV head with its own set, evicted in place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.softmax import Softmax
from kvpolicies.policy import Geometry, Policy, View
from kvpolicies.rope import Rope
from kvpolicies.store import SlotStore
from kvpolicies.trace import NEVER
from kvpolicies.transfer import counting


class SlotLayer:
    """Keys, values and positions of one layer, in slots that are allocated once.

    Slots [0, length) of a row are filled, in no order; the rest is empty. Lengths and all other
    counts live on the host, so that no step waits for the device.

    Args:
        geometry: sizes.
        policy: who decides what goes.
        index: the layer's number in the model.
        rope: the model's rotation at this layer.
        trace_length: record eviction times of so many positions.
        span: tokens that a query looks back, itself included (a sliding window); None = all.
        store: where the tensors lie, beside those of like layers; default: in one of its own.

    Attributes:
        keys, values: [B, H, C, D]. positions: [B, H, C] int32, -1 = empty.
        lengths, seen: per row: filled slots, and tokens processed so far.
        prompts: per row, tokens of the prompt, as far as it is known.
        peak: per row, the most slots ever held.
        eviction_times: [B, H, T] int32 when a trace is recorded (see trace.py).
    """

    def __init__(
        self,
        geometry: Geometry,
        policy: Policy,
        index: int,
        rope: Rope,
        trace_length: int = 0,
        span: int | None = None,
        store: SlotStore | None = None,
    ):
        g = geometry
        self.span, self.softmax = span, Softmax(g.head_dim**-0.5)
        self.geometry, self.policy, self.index, self.rope = g, policy, index, rope
        self.store = store or SlotStore(1, geometry, policy, trace_length)
        self.place = len(self.store.members)
        self.store.members.append(self)
        self.keys, self.values = self.store.keys[self.place], self.store.values[self.place]
        self.positions = self.store.positions[self.place]
        self.state = policy.init_state(g)
        self.slot_state = {name: t[self.place] for name, t in self.store.slot_state.items()}
        times = self.store.eviction_times
        self.eviction_times = None if times is None else times[self.place]
        self.lengths, self.seen, self.peak = [0] * g.rows, [0] * g.rows, [0] * g.rows
        self.counters: list[dict[str, int]] = [{} for _ in range(g.rows)]
        self.budgets: list[Budget | None] = [None] * g.rows
        self.prompts, self.seeds = [0] * g.rows, [0] * g.rows
        self.futures: list[Any] = [None] * g.rows

    def reset(
        self, row: int, budget: Budget, seed: int, future: Any = None, prompt: int = 0
    ) -> None:
        """Empties a row for a new sequence; nothing of the old one can be seen any more.

        `prompt` is its prompt's length, 0 where that is not known beforehand.
        """
        self.positions[row].fill_(-1)
        self.lengths[row] = self.seen[row] = self.peak[row] = 0
        self.counters[row] = {}
        for tensor in (*self.state.values(), *self.slot_state.values()):
            tensor[row].zero_()
        if self.eviction_times is not None:
            self.eviction_times[row].fill_(NEVER)
        self.budgets[row], self.seeds[row], self.futures[row] = budget, seed, future
        self.prompts[row] = prompt

    def move_row(self, source: int, destination: int) -> None:
        """Copies all that belongs to a row's sequence over another row's."""
        for tensor in self._row_tensors():
            tensor[destination].copy_(tensor[source])
        for per_row in self._row_lists():
            per_row[destination] = per_row[source]
        self.counters[source] = {}

    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges all that belongs to two rows' sequences; copies one tensor's row at a time."""
        for tensor in self._row_tensors():
            kept = tensor[one].clone()
            tensor[one].copy_(tensor[other])
            tensor[other].copy_(kept)
        for per_row in self._row_lists():
            per_row[one], per_row[other] = per_row[other], per_row[one]

    def _row_tensors(self) -> list[Tensor]:
        own = [self.keys, self.values, self.positions]
        own += [] if self.eviction_times is None else [self.eviction_times]
        return [*own, *self.state.values(), *self.slot_state.values()]

    def _row_lists(self) -> list[list[Any]]:
        return [
            self.lengths,
            self.seen,
            self.peak,
            self.prompts,
            self.counters,
            self.budgets,
            self.seeds,
            self.futures,
        ]

    def budget(self, row: int) -> Budget:
        """The budget of the row's sequence."""
        budget = self.budgets[row]
        assert budget is not None, "row used before reset"
        return budget

    def room(self, row: int, remaining: int) -> tuple[int, int]:
        """(slots to free, tokens to process) in the row's next step, `remaining` tokens waiting.

        Raises:
            UserError: when the row is full and its policy never evicts.
        """
        budget = self.budget(row)
        free = self.policy.full_at(budget, self.seen[row]) - self.lengths[row]
        if free > 0:
            return 0, min(remaining, free)
        if not self.policy.evicts:
            raise UserError(
                f"policy {self.policy}: the sequence outgrew its {budget.total} slots, and "
                "nothing may be evicted; the budget must be prompt + max_new_tokens"
            )
        n_drop = max(self.policy.drop(budget), min(remaining, budget.chunk))
        return n_drop, min(remaining, n_drop)

    def append(self, keys: Tensor, values: Tensor, rows: slice) -> None:
        """Puts n new tokens [b, H, n, D] of each row behind its filled slots."""
        n = keys.shape[2]
        new = self.token_positions(rows, n)[:, None].to(torch.int32)  # [b, 1, n]
        if self.policy.rerotates:
            keys = self.rope.unrotate(keys, new[:, 0])
        lengths = self.lengths[rows]
        pairs = [(self.keys, keys), (self.values, values), (self.positions, new)]
        pairs += [(t, t.new_zeros(())) for t in self.slot_state.values()]
        if len(set(lengths)) == 1:
            for store, fresh in pairs:
                store[rows, :, lengths[0] : lengths[0] + n] = fresh
        else:
            row = torch.arange(rows.start, rows.stop, device=keys.device)[:, None]
            slot = self.counting(lengths, n)  # [b, n]
            for store, fresh in pairs:
                fresh = fresh.to(store.dtype)
                # Indices around a slice put their own axes first: [b, n, H, ...].
                store[row, :, slot] = fresh.transpose(1, 2) if fresh.dim() else fresh
        self.count(rows, n)

    def expect(self, row: int, n: int) -> None:
        """A forward brings n tokens of the row: its prompt, until one brings a single token.

        Nobody need say how long a prompt is; where it was said (`reset`), this changes nothing.
        """
        seen = self.seen[row]
        if (n > 1 or seen == 0) and seen <= self.prompts[row] < seen + n:
            self.prompts[row] = seen + n

    def count(self, rows: slice, n: int) -> None:
        """n new tokens of each row lie in its slots."""
        for i in range(rows.start, rows.stop):
            self.lengths[i] += n
            self.seen[i] += n
            self.peak[i] = max(self.peak[i], self.lengths[i])

    def make_room(self, rows: slice, drops: Sequence[int]) -> None:
        """Evicts `drops[i]` slots of every head of each row of this layer alone."""
        self.store.make_room(rows, drops, slice(self.place, self.place + 1))

    def shrink(self, rows: slice, n: int) -> None:
        """n slots of each row are gone; tells the policy."""
        for i in range(rows.start, rows.stop):
            self.lengths[i] -= n
        if type(self.policy).evicted is not Policy.evicted:
            self.policy.evicted(self.view(rows))

    def view(self, rows: slice) -> View:
        """What a policy may see of some rows; tensors are views into this layer."""
        lengths = self.lengths[rows]
        filled = max(lengths)
        return View(
            geometry=self.geometry,
            layer=self.index,
            keys=self.keys[rows, :, :filled],
            values=self.values[rows, :, :filled],
            positions=self.positions[rows, :, :filled],
            lengths=lengths,
            seen=self.seen[rows],
            prompts=[min(p, n) for p, n in zip(self.prompts[rows], self.seen[rows], strict=True)],
            budgets=[self.budget(i) for i in range(rows.start, rows.stop)],
            seeds=self.seeds[rows],
            state={name: tensor[rows] for name, tensor in self.state.items()},
            slot_state={name: t[rows, :, :filled] for name, t in self.slot_state.items()},
            counters=self.counters[rows],
            rope=self.rope,
            softmax=self.softmax,
            futures=self.futures[rows],
        )

    def times(self, row: int, n: int) -> Tensor:
        """Eviction times [H, n] int32 of the row's first n tokens, when a trace is recorded.

        A sliding window hides a token `span` steps after it came, whenever its slot is freed.
        """
        assert self.eviction_times is not None, "no trace is recorded"
        if self.span is None:
            return self.eviction_times[row, :, :n]
        times = torch.arange(n, dtype=torch.int32, device=self.positions.device) + self.span
        return times.expand(self.geometry.heads, n)

    def token_positions(self, rows: slice, n: int) -> Tensor:
        """Positions [b, n] int64 that the next n tokens of each row will have."""
        return self.counting(self.seen[rows], n)

    def counting(self, starts: Sequence[int], n: int) -> Tensor:
        """[len(starts), n] int64: row i counts starts[i], starts[i] + 1, ..."""
        return counting(starts, n, self.geometry.device)
