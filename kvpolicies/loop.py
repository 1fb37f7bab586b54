"""The one decode loop: every policy runs through these lines and no others.

Prompts wait in a queue; each free row of the batch takes the next one (a row always costs the same
memory), is prefilled in steps that its budget can hold, and decodes with the others until it stops.
A request's tokens and evictions do not depend on its company.

`generate` knows all requests beforehand and runs to the end (`run`); a server adds and cancels them
while the others decode (`add`, `Request.cancelled`, `advance`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicies.adapter import forward, uncached_forward
from kvpolicies.admission import Request
from kvpolicies.cache import FixedBudgetCache
from kvpolicies.errors import UserError
from kvpolicies.fixed import FixedSteps, bucket
from kvpolicies.generation import Generation, finished
from kvpolicies.recording import record
from kvpolicies.rows import Counts
from kvpolicies.sampling import NONE, choose_each
from kvpolicies.transfer import on_device

OnLogits = Callable[[int, int, Tensor], None]

# Decode steps between two looks at the new tokens. A look waits for the device; on a CPU there is
# nothing to wait for. What a row generates after its stop token is thrown away.
SYNC_EVERY = {"cuda": 8}


@dataclass(frozen=True)
class Event:
    """What became of one request since its last event."""

    index: int
    tokens: list[int]
    """New tokens, a stop token included."""
    finish: str | None = None
    """"stop", "length" or "cancelled" with the last event; None = there is more to come."""
    generation: Generation | None = None
    """All of it, with "stop" and "length"."""


class Loop:
    """Rows, their requests, and the forwards that move them on.

    One thread drives it, in `torch.no_grad()` and inside `attach(model, cache)`.

    Args:
        cache: not yet allocated; gets `rows` rows.
        stops: tokens that end a request.
        mode: how decode steps run, one of fixed.MODES.
        chunk: most prompt tokens between two decode steps, of all rows together; None brings whole
            prompts in. A policy that evicts keeps the steps of its budget, one a row and turn.
    """

    def __init__(
        self,
        model: Any,
        cache: FixedBudgetCache,
        rows: int,
        stops: frozenset[int],
        on_logits: OnLogits | None,
        mode: str,
        chunk: int | None = None,
    ):
        self.fixed = None if mode == "eager" else FixedSteps(cache, uncached_forward(model), mode)
        self.model, self.cache, self.chunk = model, cache, chunk
        self.stops, self.on_logits = stops, on_logits
        weight = next(model.parameters())
        self.device = weight.device
        cache.allocate(rows, weight.dtype, weight.device)
        self.queue: deque[Request] = deque()
        self.active: list[Request] = []
        self.free = list(range(rows))

    def run(self, requests: list[Request]) -> Iterator[tuple[int, Generation]]:
        """Yields (index, generation) as requests finish."""
        self.queue.extend(requests)
        while self.busy:
            for event in self.advance():
                if event.generation:
                    yield event.index, event.generation

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self.queue.append(request)

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything to do."""
        return bool(self.queue or self.active)

    def advance(self) -> Iterator[Event]:
        """One turn: prompts are brought into rows, then those that are in decode to the next look.

        Events come as they happen, and must be taken to the last.

        Raises:
            UserError: if a policy or the model produced NaN; nothing of that run is handed out.
        """
        self._admit()
        self._prefill()
        yield from self._emit_events()
        if ready := self._gathered():
            self._decode(ready)
            yield from self._emit_events()

    def _admit(self) -> None:
        """Gives free rows to those that wait; the last ones where a prompt may take turns."""
        while self.free and self.queue:
            request = self.queue.popleft()
            request.row = self.free.pop(-1 if self.chunk else 0)
            self._start(request)
            self.active.append(request)
        self.active.sort(key=_row)

    def _emit_events(self) -> Iterator[Event]:
        """What the last forwards brought; requests at their end give their rows back."""
        events = []
        for r in list(self.active):
            tokens, finish = r.tokens[r.reported :], self._finish(r)
            r.reported = len(r.tokens)
            if finish or tokens:
                done = None if finish in (None, "cancelled") else finished(self.cache, r, finish)
                events.append(Event(r.index, tokens, finish, done))
            if finish:
                self._release(r)
        for r in [r for r in self.queue if r.cancelled]:
            self.queue.remove(r)
            events.append(Event(r.index, [], "cancelled"))
        if events:
            self.cache.check_scores()  # before anything of this run is handed out
        yield from events

    def _release(self, r: Request) -> None:
        self.active.remove(r)
        self.free = sorted([*self.free, r.row])
        self.cache.forget_future(r.row)

    def _start(self, r: Request) -> None:
        """Gives the request its row, and its recording to a policy that looks ahead."""
        futures = record(self.model, r.to_feed) if self.cache.policy.needs_future else None
        self.cache.start(r.row, r.schedule, r.identity, futures)

    def _gathered(self) -> list[Request]:
        """Those whose prompts are in, brought into the first rows: a step is one slice of them."""
        ready = [r for r in self.active if not r.waiting]
        while ready and ready[-1].row >= len(ready):
            request = ready.pop()
            held = {r.row for r in ready}
            self._move(request, next(row for row in range(request.row) if row not in held))
            ready = sorted([*ready, request], key=_row)
        self.active.sort(key=_row)
        return ready

    def _move(self, request: Request, row: int) -> None:
        """To a free row, or to one whose request is still being brought in, which takes its own."""
        left, request.row = request.row, row
        if row in self.free:
            self.cache.move_row(left, row)
            self.cache.forget_future(left)
            self.free = sorted([*(r for r in self.free if r != row), left])
            return
        self.cache.swap_rows(left, row)
        next(r for r in self.active if r.row == row and r is not request).row = left

    def _prefill(self) -> bool:
        """Brings prompts in, each row in steps that its own budget can hold: to the end, or one.

        Returns whether there was any to bring in.
        """
        any_came = False
        while todo := [r for r in self.active if r.waiting and not r.cancelled]:
            most = self.chunk and max(1, self.chunk // len(todo))
            self._advance(todo, [self.cache.next_step(r.row, r.waiting, most) for r in todo])
            any_came = True
            if self.chunk:
                break
        return any_came

    def _advance(self, requests: list[Request], counts: list[int]) -> None:
        """One forward: counts[i] prompt tokens of each; a new token where the prompt is done."""
        begin = _now()
        width = max(counts)
        tokens, positions = [], []
        for r, n in zip(requests, counts, strict=True):
            padding = [0] * (width - n)
            tokens.append(padding + r.prompt[r.fed : r.fed + n])
            positions.append([*padding, *range(r.fed, r.fed + n)])
            r.fed += n
        batch = torch.tensor([tokens, positions], device=self.device)
        prompt, ended = [True] * len(requests), [not r.waiting for r in requests]
        brought = Counts([r.row for r in requests], counts, prompt, ended)
        logits = self._forward(batch[0], batch[1], brought)
        ready = [i for i, r in enumerate(requests) if not r.waiting]
        if ready:
            every = len(ready) == len(requests)
            first = [requests[i] for i in ready]
            chosen = self._chosen(first, logits if every else logits[ready], 0)
            self._extend(first, chosen[:, None].tolist())
        _share(begin, requests)

    def _decode(self, active: list[Request]) -> None:
        """One new token of each active request, or a few: their rows are the cache's first ones."""
        begin = _now()
        chosen: list[Tensor] = []
        for step in range(self._steps_until_sync(active)):
            fed = [r.fed + step for r in active]
            if active[0].forced is None and chosen:
                tokens = chosen[-1].clamp_min(0)  # of NONE, until the next look
            else:
                tokens = on_device([r.next_token(step) for r in active], self.device)
            if self.fixed and self._bucket_is_free(len(active)):
                logits = self.fixed.step(tokens, fed)
            else:
                positions = on_device(fed, self.device)[:, None]
                logits = self._forward(tokens[:, None], positions, Counts.of_a_step(len(fed)))
            chosen.append(self._chosen(active, logits, step))
        self._extend(active, torch.stack(chosen, dim=1).tolist())
        for r in active:
            r.fed = len(r.prompt) + len(r.tokens) - 1
        _share(begin, active)

    def _bucket_is_free(self, active: int) -> bool:
        """Whether a step of fixed shapes writes to no row whose prompt is still on its way."""
        size = bucket(active, self.cache.rows)
        return all(r.row >= size for r in self.active[active:])

    def _steps_until_sync(self, active: list[Request]) -> int:
        """Decode steps until the host must know the tokens."""
        # Whoever watches logits sees each step; a paper's own rule may hold more at each.
        if self.on_logits or self.cache.policy.own_rule:
            return 1
        left = min(r.limit - len(r.tokens) for r in active)
        return min(left, SYNC_EVERY.get(self.device.type, 1))

    def _forward(self, tokens: Tensor, positions: Tensor, counts: Counts) -> Tensor:
        self.cache.begin(counts, scheduled=True)
        return forward(self.model, tokens, positions, self.cache)

    def _chosen(self, requests: list[Request], logits: Tensor, step: int) -> Tensor:
        """Each request's next token [A], from [A, V] logits; stays on the device."""
        if self.on_logits:
            for r, row in zip(requests, logits, strict=True):
                self.on_logits(r.index, len(r.tokens) + step, row)
        return choose_each(logits, [r.sampling for r in requests], [r.random for r in requests])

    def _extend(self, requests: list[Request], chosen: list[list[int]]) -> None:
        """Gives each request its new tokens, up to the one that ends it."""
        for r, tokens in zip(requests, chosen, strict=True):
            for token in tokens:
                if not self._end(r):
                    if token == NONE:
                        raise UserError(
                            f"prompt {r.index}: the model's logits are not finite at its new token "
                            f"{len(r.tokens)} (try a wider dtype such as bfloat16 or float32)"
                        )
                    r.choices.append(token)
                    r.tokens.append(token if r.forced is None else r.forced[len(r.tokens)])

    def _finish(self, r: Request) -> str | None:
        return self._end(r) or ("cancelled" if r.cancelled else None)

    def _end(self, r: Request) -> str | None:
        """The end that its tokens came to, if they did."""
        if r.forced is None and r.tokens and r.tokens[-1] in self.stops:
            return "stop"
        return "length" if len(r.tokens) >= r.limit else None


def _row(request: Request) -> int:
    return request.row


def _now() -> tuple[float, float]:
    """Seconds on the wall, and of the processor."""
    return time.perf_counter(), time.process_time()


def _share(begin: tuple[float, float], requests: list[Request]) -> None:
    wall, processor = (end - start for start, end in zip(begin, _now(), strict=True))
    for r in requests:
        r.seconds += wall / len(requests)
        r.processor += processor / len(requests)
