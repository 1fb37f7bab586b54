"""The tensors of layers that share their counts: fixed slots, each KV head with its own set.

Slots [0, length) of a row are filled, in no order of position; the rest is empty. Which slots go is
each layer's and each head's own affair; how many, and when, is the plan's (rows.py). So one call
chooses the victims of every layer and one moves them: a decode step that frees a single slot would
otherwise spend more time on calls than on work.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.eviction import choose_victims
from kvpolicies.kernels.compact import compact
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.quantise import Codes, dequantise, layout, quantise, scale_bytes
from kvpolicies.policy import Geometry, Observation, Policy, Schedule, View
from kvpolicies.rope import Rope
from kvpolicies.rows import Move, Rows, runs
from kvpolicies.trace import NEVER
from kvpolicies.transfer import counting, on_device

ALL = slice(None)
# Layers are shown to a policy at once as long as they hold so few slots together: many calls cost
# more than their work then, and what a policy computes in between stays small.
SLOTS_AT_ONCE = 1 << 18
# Views of the same slots are made once: a full row asks for the same ones at every step.
VIEWS = 256


class SlotViews(NamedTuple):
    """Views of the filled slots of some rows, and their state: one layer's, or of n layers.

    Layers that are shown together are more rows: layer by layer, [n * B, ...].
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    slot_state: dict[str, Tensor]
    state: dict[str, Tensor]


class SlotGroup:
    """Keys, values and positions of Y layers in slots that are allocated once.

    Args:
        geometry: sizes.
        policy: who decides what goes.
        layers: the layers' numbers in the model.
        ropes: the model's rotation at each of them.
        trace_length: record eviction times of so many positions.
        span: tokens that a query looks back, itself included (a sliding window); None = all.
        outputs: the model's output projection at each of them, where the policy wants it.
        kv_dtype: what keys and values are stored in (budget.KV_DTYPES): `auto` is the geometry's.

    Attributes:
        rows: the counts that all these layers share.
        keys, values: [Y, B, H, C, D]; codes [Y, B, H, C, W] where `kv_dtype` is not auto.
        scales: of the codes of keys and of values, [Y, B, H, C] float16 each; none without.
        positions: [Y, B, H, C] int32, -1 = empty.
        slot_state: the policy's slot-aligned tensors [Y, B, H, C].
        state: the policy's tensors [Y, B, ...].
        eviction_times: [Y, B, H, T] int32 when a trace of T positions is recorded (trace.py).
        bad_scores: [Y] bool, set on the device when a score is NaN; the host reads it when it waits
            anyway.
    """

    def __init__(
        self,
        geometry: Geometry,
        policy: Policy,
        layers: Sequence[int],
        ropes: Sequence[Rope],
        trace_length: int = 0,
        span: int | None = None,
        outputs: Sequence[Tensor] | None = None,
        kv_dtype: str = "auto",
    ):
        g = geometry
        shape = (len(layers), g.rows, g.heads, g.slots)
        self.geometry, self.policy, self.span = g, policy, span
        self.layers, self.ropes, self.outputs = list(layers), list(ropes), outputs
        # Asked at every layer of every step, so looked up once.
        self.observes, self.rerotates = policy.observes, policy.rerotates
        self.needs_attention = policy.needs_attention
        self.rows = Rows(g.rows)
        self.kind = None if kv_dtype == "auto" else kv_dtype
        # Codes are read back, and attended to, in float32; a model of float64 stays one.
        self.wide = torch.promote_types(g.dtype, torch.float32)
        width, dtype = layout(self.kind, g.head_dim) if self.kind else (g.head_dim, g.dtype)
        self.keys = torch.zeros(*shape, width, dtype=dtype, device=g.device)
        self.values = torch.zeros_like(self.keys)
        self.scales = [
            torch.zeros(shape, dtype=torch.float16, device=g.device)
            for _ in range(2 if self.kind and scale_bytes(self.kind) else 0)
        ]
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=g.device)
        self.slot_state = {
            name: torch.zeros(shape, dtype=dtype, device=g.device)
            for name, dtype in policy.slot_tensors.items()
        }
        self.eviction_times: Tensor | None = None
        if trace_length:
            times = (*shape[:3], trace_length)
            self.eviction_times = torch.full(times, NEVER, dtype=torch.int32, device=g.device)
        self.bad_scores = torch.zeros(len(layers), dtype=torch.bool, device=g.device)
        self.state = {
            name: torch.zeros((len(layers), *t.shape), dtype=t.dtype, device=t.device)
            for name, t in policy.init_state(g).items()
        }
        self.softmax = [LogitTransform(g.head_dim**-0.5)] * len(layers)
        # A list a layer, an entry a row.
        self.counters: list[list[dict[str, int]]] = [[{} for _ in range(g.rows)] for _ in layers]
        self.futures: list[list[Any]] = [[None] * g.rows for _ in layers]
        self._parts: dict[tuple[int, int, int, int, int], SlotViews] = {}
        self._together: list[range] = [range(y, y + 1) for y in range(len(layers))]
        self._attended = False
        # What each layer shows of this forward, where it waits for the last one.
        self._waiting = False
        self._shown: list[Observation] = []
        # Prompt queries [1, H, G, n, D] and positions that `observe` must see with those to come.
        self.held_back: list[list[list[tuple[Tensor, Tensor]]]] = [
            [[] for _ in range(g.rows)] for _ in layers
        ]

    @property
    def stored(self) -> list[Tensor]:
        """All that moves with a slot: [Y, B, H, C, ...]."""
        return [self.keys, self.values, self.positions, *self.slot_state.values(), *self.scales]

    def reset(
        self, row: int, schedule: Schedule, seed: int, futures: Sequence[Any] | None = None
    ) -> None:
        """Empties a row for a new sequence; nothing of the old one can be seen any more.

        Args:
            seed: identifies the sequence in any batch. futures: a recording a layer, for a policy
                that looks ahead (recording.py).
        """
        self.rows.reset(row, schedule, seed)
        self.clear(row, futures)

    def clear(self, row: int, futures: Sequence[Any] | None = None) -> None:
        """Empties a row's slots and state, and leaves the counts, which others may share."""
        self.positions[:, row].fill_(-1)
        for tensor in self.slot_state.values():
            tensor[:, row].zero_()
        if self.eviction_times is not None:
            self.eviction_times[:, row].fill_(NEVER)
        for tensor in self.state.values():
            tensor[:, row].zero_()
        for y in range(len(self.layers)):
            self.counters[y][row] = {}
            self.held_back[y][row] = []
            self.futures[y][row] = None if futures is None else futures[y]

    def move_row(self, source: int, destination: int) -> None:
        """Moves a sequence to a row that nobody uses; what lay there is of no use in the other."""
        for tensor in self._row_tensors():
            tensor[destination].copy_(tensor[source])
        self._swap_lists(source, destination)

    def swap(self, one: int, other: int) -> None:
        """Exchanges the sequences of two rows; copies one tensor's row of one layer at a time."""
        for tensor in self._row_tensors():
            kept = tensor[one].clone()
            tensor[one].copy_(tensor[other])
            tensor[other].copy_(kept)
        self._swap_lists(one, other)

    def forget_future(self, row: int) -> None:
        """Lets go of the recording that a row's sequence was given."""
        for futures in self.futures:
            futures[row] = None

    def _swap_lists(self, one: int, other: int) -> None:
        self.rows.swap(one, other)
        per_layer: list[list[Any]] = [*self.futures, *self.counters, *self.held_back]
        for rows in per_layer:
            rows[one], rows[other] = rows[other], rows[one]

    def _row_tensors(self) -> list[Tensor]:
        times = [] if self.eviction_times is None else [self.eviction_times]
        tensors = (*self.stored, *times, *self.state.values())
        return [layer for tensor in tensors for layer in tensor]

    def view(
        self,
        y: int,
        rows: slice,
        lengths: list[int],
        seen: list[int],
        prompts: list[int],
        n: int = 1,
        n_drop: int = 0,
    ) -> View:
        """What a policy may see of some rows of a layer, or of all rows of n layers from y on.

        Tensors are views, never copies.
        """
        counts, which = self.rows, range(y, y + n)
        parts = self._parts_of(y, n, rows, max(lengths))
        keys, values = parts.keys, parts.values
        if self.kind:
            keys, values = (x.flatten(0, 1) for x in self.read(slice(y, y + n), rows, max(lengths)))
        schedules = [counts.schedule(i) for i in range(rows.start, rows.stop)]
        return View(
            geometry=self.geometry,
            layer=self.layers[y],
            keys=keys,
            values=values,
            positions=parts.positions,
            lengths=lengths * n,
            seen=seen * n,
            schedules=schedules * n,
            prompts=prompts * n,
            seeds=counts.seeds[rows] * n,
            state=parts.state,
            slot_state=parts.slot_state,
            counters=[c for i in which for c in self.counters[i][rows]],
            rope=self.ropes[y],
            softmax=self.softmax[y],
            futures=[f for i in which for f in self.futures[i][rows]],
            n_drop=n_drop,
            output=None if self.outputs is None else self.outputs[y],
        )

    def _parts_of(self, y: int, n: int, rows: slice, filled: int) -> SlotViews:
        key = (y, n, rows.start, rows.stop, filled)
        if key not in self._parts:
            if len(self._parts) >= VIEWS:
                self._parts.clear()

            def part(x: Tensor) -> Tensor:
                x = x[y : y + n, rows]
                return x[0] if n == 1 else x.view(-1, *x.shape[2:])

            def slots(x: Tensor) -> Tensor:
                return part(x)[:, :, :filled]

            self._parts[key] = SlotViews(
                slots(self.keys),
                slots(self.values),
                slots(self.positions),
                {name: slots(x) for name, x in self.slot_state.items()},
                {name: part(x) for name, x in self.state.items()},
            )
        return self._parts[key]

    def _layers(self, rows: slice) -> list[range]:
        """Layers that are shown at once, in order; one at a time where some rows are left out."""
        if rows.stop - rows.start < self.geometry.rows:
            return [range(y, y + 1) for y in range(len(self.layers))]
        return self._together

    def _put_together(self) -> None:
        """Finds the layers that a policy may be shown at once: once their softmax is known."""
        g, self._attended = self.geometry, True
        if not self.policy.layers_alike:
            return
        most = max(1, SLOTS_AT_ONCE // (g.rows * g.heads * g.slots))
        together: list[range] = []
        for y, (rope, softmax) in enumerate(zip(self.ropes, self.softmax, strict=True)):
            if together and len(last := together[-1]) < most:
                of_last = self.softmax[last[0]]
                plain = softmax.plain and of_last.plain and softmax.scale == of_last.scale
                if plain and rope is self.ropes[last[0]]:
                    together[-1] = range(last[0], y + 1)
                    continue
            together.append(range(y, y + 1))
        self._together = together

    def begin(self, plan: Sequence[Move]) -> None:
        """Opens the first move of every row; see `finish`."""
        for move in plan:
            if move.first:
                self.open(move)
        # A decode step: one move, that leaves nothing between two layers to be decided.
        self._shown.clear()
        self._waiting = (
            self.observes
            and len(plan) == 1
            and plan[0].n == 1
            and not any(plan[0].prompt)
            and len(self._layers(plan[0].rows)) < len(self.layers)
            and not (self.policy.whole_prompts and any(self.held_back[0][plan[0].rows]))
        )

    def finish(self, plan: Sequence[Move]) -> None:
        """All layers have attended: the tokens count, and the policy sees what waited for it."""
        if self._waiting:
            self._show_all(plan[0])
            self._waiting = False
        if not self._attended and plan:
            self._put_together()
        self.rows.commit(plan)

    def _show_all(self, move: Move) -> None:
        for which in self._layers(move.rows):
            n, steps = len(which), [self._shown[y] for y in which]
            view = self.view(which[0], move.rows, move.lengths, move.seen, move.prompts, n)
            step = steps[0]
            if n > 1:
                step = Observation(
                    torch.cat([s.queries for s in steps]),
                    counting(move.seen_before * n, move.n, self.geometry.device),
                    _joined([s.weights for s in steps]),
                    _joined([s.inputs for s in steps]),
                )
            self.policy.observe(view, step)
        self._shown.clear()

    def open(self, move: Move, layers: slice = ALL) -> None:
        """Makes room for a move's tokens and gives them slots; keys and values come later.

        Layers that have come equally far are opened by one call.
        """
        self._evict(move, layers)
        device, n, rows, before = self.geometry.device, move.n, move.rows, move.before
        new = self.token_positions(move).to(torch.int32)
        if alike(before):
            here = (layers, rows, ALL, slice(before[0], before[0] + n))
            self.positions[here] = new[:, None]
            for tensor in self.slot_state.values():
                tensor[here] = 0
            return
        row, slot = _row_and_slot(move, device)
        # Indices around a slice put their own axes first: [b, n, Y, H].
        self.positions[layers][:, row, :, slot] = new[..., None, None]
        for tensor in self.slot_state.values():
            tensor[layers][:, row, :, slot] = tensor.new_zeros(())

    def write(self, y: int, move: Move, keys: Tensor, values: Tensor) -> None:
        """Puts keys and values [b, H, n, D] of a move's tokens into their slots of one layer."""
        before = move.before
        if self.rerotates:
            keys = self.ropes[y].unrotate(keys, self.token_positions(move))
        given = ((self.keys, keys), (self.values, values))
        if self.kind:
            given = tuple(zip(self._pair, self.coded(keys, values), strict=True))
        if alike(before):
            here = (y, move.rows, ALL, slice(before[0], before[0] + move.n))
            for tensor, new in given:
                tensor[here] = new
            return
        row, slot = _row_and_slot(move, self.geometry.device)
        for tensor, new in given:
            tensor[y][row, :, slot] = new.transpose(1, 2).to(tensor.dtype)

    @property
    def _pair(self) -> list[Tensor]:
        """What is stored of keys and values."""
        return [self.keys, self.values, *self.scales]

    def coded(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """What is to be stored of new keys and values [b, H, n, D], as `keys`, `values`, `scales`
        have it."""
        if not self.kind:
            return [keys, values]
        both = [quantise(x, self.kind) for x in (keys, values)]
        return [x.codes for x in both] + [x.scales for x in both if x.scales is not None]

    def put(self, y: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """One token's keys and values [R, H, 1, D] of each of the first R rows of a layer, into the
        slots [R, 1] that a tensor names."""
        r, heads = keys.shape[:2]
        for tensor, new in zip(self._pair, self.coded(keys, values), strict=True):
            where = slots[:, None, :].expand(r, heads, 1)
            where = where if new.dim() == 3 else where[..., None].expand(new.shape)
            tensor[y, :r].scatter_(2, where, new)

    def read(self, y: int | slice, rows: slice, filled: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the first slots of some rows of a layer, or of layers; float32 if they
        are read from codes, else views."""
        keys, values = (t[y, rows, ..., :filled, :] for t in (self.keys, self.values))
        if not self.kind:
            return keys, values
        scales = [t[y, rows, ..., :filled] for t in self.scales] or [None, None]
        first, second = map(Codes, (keys, values), scales)
        back = [dequantise(x, self.kind).to(self.wide) for x in (first, second)]
        return back[0], back[1]

    def token_positions(self, move: Move) -> Tensor:
        """Positions [b, n] int64 of a move's tokens."""
        return counting(move.seen_before, move.n, self.geometry.device)

    def observe(self, y: int, move: Move, step: Observation) -> None:
        """Shows a move's tokens to the policy, once they have attended; in a decode step later."""
        if self._waiting:
            assert len(self._shown) == y
            self._shown.append(step)
            return
        policy, held_back = self.policy, self.held_back[y]
        if not policy.whole_prompts or not (any(move.unfinished) or any(held_back[move.rows])):
            view = self.view(y, move.rows, move.lengths, move.seen, move.prompts)
            policy.observe(view, step)
            return
        for i, row in enumerate(range(move.rows.start, move.rows.stop)):
            length, seen = move.lengths[i], move.seen[i]
            if held_back[row] and not move.prompt[i]:
                self._show(y, row, length - move.n, seen - move.n, move.prompts[i])
            held_back[row].append((step.queries[i : i + 1], step.positions[i : i + 1]))
            if not move.unfinished[i]:
                self._show(y, row, length, seen, move.prompts[i])

    def _show(self, y: int, row: int, length: int, seen: int, prompt: int) -> None:
        """Shows what was held back of a row, as one step."""
        queries, positions = zip(*self.held_back[y][row], strict=True)
        self.held_back[y][row] = []
        view = self.view(y, slice(row, row + 1), [length], [seen], [prompt])
        self.policy.observe(
            view, Observation(torch.cat(queries, dim=3), torch.cat(positions, dim=1))
        )

    def times(self, y: int, row: int, n: int) -> Tensor:
        """Eviction times [H, n] int32 of the row's first n tokens, when a trace is recorded.

        A sliding window hides a token `span` steps after it came, whenever its slot is freed.
        """
        assert self.eviction_times is not None, "no trace is recorded"
        if self.span is None:
            return self.eviction_times[y, row, :, :n]
        times = torch.arange(n, dtype=torch.int32, device=self.geometry.device) + self.span
        return times.expand(self.geometry.heads, n)

    def _evict(self, move: Move, layers: slice) -> None:
        """Evicts what a move needs, of every head of these layers."""
        held = [b + d if d else 0 for b, d in zip(move.before, move.drops, strict=True)]
        for first, last, (n_drop, length) in runs(zip(move.drops, held, strict=True)):
            if n_drop:
                self._drop(layers, move.part(first, last), n_drop, length)

    def _drop(self, layers: slice, move: Move, n_drop: int, length: int) -> None:
        """Evicts `n_drop` of the `length` filled slots of every head of a move's rows."""
        rows, seen, prompts = move.rows, move.seen_before, move.prompts_before
        lengths = [length] * len(seen)
        which = self._layers(rows) if layers == ALL else [range(layers.start, layers.stop)]
        views = [self.view(w[0], rows, lengths, seen, prompts, len(w), n_drop) for w in which]
        scores = _joined([self.policy.scores(view) for view in views])
        assert scores is not None
        positions = self.positions[layers, rows, :, :length]
        scores = scores.view(positions.shape)  # [y, b, H, L]
        self.bad_scores[layers] |= scores.isnan().flatten(1).any(dim=1)
        if self.geometry.device.type == "cpu":
            self.check_scores()
        newest = on_device(seen, positions.device) - 1
        schedules = views[0].schedules[: len(seen)]
        protected = [(s.sinks, s.window_beside(length, n_drop)) for s in schedules]
        parts = [
            choose_victims(scores[:, a:b], positions[:, a:b], newest[a:b], *p, n_drop)
            for a, b, p in runs(protected)
        ]
        victims = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.eviction_times is not None:
            gone = positions.gather(-1, victims).long()
            when = on_device(seen, gone.device).to(torch.int32)
            times = when[:, None, None].expand(gone.shape)
            self.eviction_times[layers, rows].scatter_(-1, gone, times)
        compact([t[layers, rows] for t in self.stored], victims, length)
        self.positions[layers, rows, :, length - n_drop : length] = -1
        if type(self.policy).evicted is not Policy.evicted:
            left = [length - n_drop] * len(seen)
            for w in which:
                self.policy.evicted(self.view(w[0], rows, left, seen, prompts, len(w)))

    def check_scores(self) -> None:
        """Raises UserError if any score so far was NaN (waits for the device)."""
        if bool(self.bad_scores.any()):
            layer = self.layers[int(self.bad_scores.nonzero()[0])]
            raise UserError(
                f"policy {self.policy}: NaN in a score at layer {layer}; the model's queries or "
                "keys are not finite (try a wider dtype such as bfloat16 or float32)"
            )


def alike(numbers: list[int]) -> bool:
    """Whether all are equal."""
    return numbers.count(numbers[0]) == len(numbers)


def _row_and_slot(move: Move, device: torch.device) -> tuple[Tensor, Tensor]:
    """Index tensors [b, 1] and [b, n] of the slots that a move's tokens take."""
    rows = on_device(range(move.rows.start, move.rows.stop), device)[:, None]
    return rows, counting(move.before, move.n, device)


def _joined(tensors: Sequence[Tensor | None]) -> Any:
    """Tensors of layers as those of more rows; None if there are none."""
    given = [t for t in tensors if t is not None]
    return torch.cat(given) if len(given) > 1 else (given[0] if given else None)
