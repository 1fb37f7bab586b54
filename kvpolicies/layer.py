"""One layer of the cache: fixed slots, each KV head with its own set, evicted in place."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.eviction import choose_victims
from kvpolicies.kernels.compact import compact
from kvpolicies.kernels.softmax import Softmax
from kvpolicies.policy import Geometry, Policy, View
from kvpolicies.rope import Rope
from kvpolicies.trace import NEVER

Key = TypeVar("Key")


class SlotLayer:
    """Keys, values and positions of one layer, in slots that are allocated once.

    Slots [0, length) of a row are filled, in no order; the rest is empty. Lengths and all other
    counts live on the host, so that no step waits for the device.

    Args:
        geometry: sizes; every tensor is allocated here.
        policy: who decides what goes.
        index: the layer's number in the model.
        rope: the model's rotation at this layer.
        trace_length: record eviction times of so many positions.
        span: tokens that a query looks back, itself included (a sliding window); None = all.

    Attributes:
        keys, values: [B, H, C, D]. positions: [B, H, C] int32, -1 = empty.
        lengths, seen: per row: filled slots, and tokens processed so far.
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
    ):
        g = geometry
        self.span, self.softmax = span, Softmax(g.head_dim**-0.5)
        self.geometry, self.policy, self.index, self.rope = g, policy, index, rope
        shape = (g.rows, g.heads, g.slots, g.head_dim)
        self.keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self.values = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self.positions = torch.full(shape[:3], -1, dtype=torch.int32, device=g.device)
        self.state = policy.init_state(g)
        self.slot_state = {
            name: torch.zeros(shape[:3], dtype=dtype, device=g.device)
            for name, dtype in policy.slot_tensors.items()
        }
        self.lengths, self.seen, self.peak = [0] * g.rows, [0] * g.rows, [0] * g.rows
        self.counters: list[dict[str, int]] = [{} for _ in range(g.rows)]
        self.budgets: list[Budget | None] = [None] * g.rows
        self.seeds = [0] * g.rows
        self.futures: list[Any] = [None] * g.rows
        self.eviction_times: Tensor | None = None
        if trace_length:
            times = (g.rows, g.heads, trace_length)
            self.eviction_times = torch.full(times, NEVER, dtype=torch.int32, device=g.device)
        # Set on the device when a score is NaN; read by the host when it waits anyway.
        self.bad_score = torch.zeros((), dtype=torch.bool, device=g.device)

    def reset(self, row: int, budget: Budget, seed: int, future: Any = None) -> None:
        """Empties a row for a new sequence; nothing of the old one can be seen any more."""
        self.positions[row].fill_(-1)
        self.lengths[row] = self.seen[row] = self.peak[row] = 0
        self.counters[row] = {}
        for tensor in (*self.state.values(), *self.slot_state.values()):
            tensor[row].zero_()
        if self.eviction_times is not None:
            self.eviction_times[row].fill_(NEVER)
        self.budgets[row], self.seeds[row], self.futures[row] = budget, seed, future

    def move_row(self, source: int, destination: int) -> None:
        """Copies all that belongs to a row's sequence over another row's."""
        tensors = [self.keys, self.values, self.positions, self.eviction_times]
        for tensor in (*tensors, *self.state.values(), *self.slot_state.values()):
            if tensor is not None:
                tensor[destination].copy_(tensor[source])
        for per_row in (
            self.lengths,
            self.seen,
            self.peak,
            self.counters,
            self.budgets,
            self.seeds,
            self.futures,
        ):
            per_row[destination] = per_row[source]  # type: ignore[call-overload]
        self.counters[source] = {}

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

    def count(self, rows: slice, n: int) -> None:
        """n new tokens of each row lie in its slots."""
        for i in range(rows.start, rows.stop):
            self.lengths[i] += n
            self.seen[i] += n
            self.peak[i] = max(self.peak[i], self.lengths[i])

    def make_room(self, rows: slice, drops: Sequence[int]) -> None:
        """Evicts `drops[i]` slots of every head of each row; 0 leaves a row alone."""
        todo = [(n, self.lengths[rows.start + i] if n else 0) for i, n in enumerate(drops)]
        for first, last, (n_drop, length) in runs(todo):
            if n_drop:
                self._evict(slice(rows.start + first, rows.start + last), n_drop, length)

    def _evict(self, rows: slice, n_drop: int, length: int) -> None:
        view = self.view(rows)
        scores = self.policy.scores(view)
        self.bad_score |= scores.isnan().any()
        if self.geometry.device.type == "cpu":
            self.check_scores()
        victims = [
            choose_victims(
                scores[a:b],
                view.positions[a:b],
                view.newest[a:b],
                *self.policy.protection(budget, n_drop),
                n_drop,
            )
            for a, b, budget in runs(view.budgets)
        ]
        victims = victims[0] if len(victims) == 1 else torch.cat(victims)
        if self.eviction_times is not None:
            gone = view.positions.gather(2, victims).long()
            when = torch.tensor(view.seen, dtype=torch.int32, device=gone.device)
            self.eviction_times[rows].scatter_(2, gone, when[:, None, None].expand(gone.shape))
        stored = [self.keys, self.values, self.positions, *self.slot_state.values()]
        compact([t[rows] for t in stored], victims, length)
        self.positions[rows, :, length - n_drop : length] = -1
        for i in range(rows.start, rows.stop):
            self.lengths[i] -= n_drop
        self.policy.evicted(self.view(rows))

    def check_scores(self) -> None:
        """Raises UserError if any score so far was NaN (waits for the device)."""
        if bool(self.bad_score):
            raise UserError(
                f"policy {self.policy}: NaN in a score at layer {self.index}; the model's queries "
                "or keys are not finite (try a wider dtype such as bfloat16 or float32)"
            )

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
        return _counting(tuple(starts), n, self.geometry.device)


@lru_cache(maxsize=32)
def _counting(starts: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    # All layers of a forward ask for the same numbers: made once, never written to.
    return torch.tensor(starts, device=device)[:, None] + torch.arange(n, device=device)


def runs(items: Iterable[Key]) -> Iterator[tuple[int, int, Key]]:
    """Maximal runs of equal neighbours: (first, last + 1, item). Runs are slices, hence views."""
    start = 0
    for key, group in groupby(items):
        stop = start + sum(1 for _ in group)
        yield start, stop, key
        start = stop
