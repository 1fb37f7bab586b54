"""The one decode loop: every policy runs through these lines and no others.

Prompts wait in a queue; each free row of the batch takes the next one (a row always costs the same
memory), is prefilled in steps that its budget can hold, and decodes with the others until it stops.
A request's tokens and evictions do not depend on its company.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvpolicies.adapter import forward, uncached_forward
from kvpolicies.admission import Request
from kvpolicies.budget import Grant
from kvpolicies.cache import FixedBudgetCache
from kvpolicies.fixed import FixedSteps
from kvpolicies.generation import Generation
from kvpolicies.recording import record
from kvpolicies.sampling import Sampling, choose
from kvpolicies.trace import NEVER, EvictionTrace
from kvpolicies.transfer import on_device

OnLogits = Callable[[int, int, Tensor], None]

# Decode steps between two looks at the new tokens. A look waits for the device; on a CPU there is
# nothing to wait for. What a row generates after its stop token is thrown away.
LOOK_EVERY = {"cuda": 8}


class Loop:
    """Rows, their requests, and the forwards that move them on."""

    def __init__(
        self,
        model: Any,
        cache: FixedBudgetCache,
        sampling: Sampling,
        stops: frozenset[int],
        on_logits: OnLogits | None,
        mode: str,
    ):
        self.fixed = None if mode == "eager" else FixedSteps(cache, uncached_forward(model), mode)
        self.model, self.cache, self.sampling = model, cache, sampling
        self.stops, self.on_logits = stops, on_logits
        self.chain = sampling.processors()
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    def run(self, requests: list[Request], rows: int) -> Iterator[tuple[int, Generation]]:
        """Yields (index, generation) as requests finish."""
        queue = deque(requests)
        free = list(range(min(rows, len(requests))))
        self.cache.allocate(len(free), self.dtype, self.device)
        active: list[Request] = []
        while queue or active:
            new = []
            while free and queue:
                request = queue.popleft()
                request.row = free.pop(0)
                self._start(request)
                new.append(request)
            self._prefill(new)
            active = sorted([*active, *new], key=lambda r: r.row)
            for request in [r for r in active if self._finished(r)]:
                self.cache.check_scores()  # before anything of this run is handed out
                active.remove(request)
                free.append(request.row)
                free.sort()
                self._forget_future(request.row)
                yield request.index, self._generation(request)
            if active and not (free and queue):
                active = self._without_gaps(active, free)
                self._decode(active)

    def _start(self, r: Request) -> None:
        """Gives the request its row, and its recording to a policy that looks ahead."""
        futures = record(self.model, r.to_feed) if self.cache.policy.needs_future else None
        self.cache.start(r.row, r.budget, r.identity, futures)

    def _forget_future(self, row: int) -> None:
        for layer in self.cache.slot_layers:
            layer.futures[row] = None

    def _without_gaps(self, active: list[Request], free: list[int]) -> list[Request]:
        """Moves rows down into free ones, so that a step is one slice of the cache."""
        while free and active[-1].row > free[0]:
            request, gap = active.pop(), free.pop(0)
            self.cache.move_row(request.row, gap)
            self._forget_future(request.row)
            free.append(request.row)
            free.sort()
            request.row = gap
            active = sorted([*active, request], key=lambda r: r.row)
        return active

    def _prefill(self, new: list[Request]) -> None:
        """Brings whole prompts in, each row in steps that its own budget can hold."""
        todo = [r for r in new if r.waiting]
        while todo:
            self._advance(todo, [self.cache.next_step(r.row, r.waiting) for r in todo])
            todo = [r for r in todo if r.waiting]

    def _advance(self, requests: list[Request], counts: list[int]) -> None:
        """One forward: counts[i] prompt tokens of each; a new token where the prompt is done."""
        begin = time.perf_counter()
        width = max(counts)
        tokens, positions = [], []
        for r, n in zip(requests, counts, strict=True):
            padding = [0] * (width - n)
            tokens.append(padding + r.prompt[r.fed : r.fed + n])
            positions.append([*padding, *range(r.fed, r.fed + n)])
            r.fed += n
        batch = torch.tensor([tokens, positions], device=self.device)
        logits = self._forward(batch[0], batch[1], [r.row for r in requests], counts)
        ready = [i for i, r in enumerate(requests) if not r.waiting]
        if ready:
            every = len(ready) == len(requests)
            first = [requests[i] for i in ready]
            chosen = self._chosen(first, logits if every else logits[ready], 0)
            self._extend(first, chosen[:, None].tolist())
        _share(begin, requests)

    def _decode(self, active: list[Request]) -> None:
        """One new token of each active request, or a few: their rows are the cache's first ones."""
        begin = time.perf_counter()
        chosen: list[Tensor] = []
        for step in range(self._until_a_look(active)):
            fed = [r.fed + step for r in active]
            if active[0].forced is None and chosen:
                tokens = chosen[-1]
            else:
                tokens = on_device([r.next_token(step) for r in active], self.device)
            if self.fixed:
                logits = self.fixed.step(tokens, fed)
            else:
                self.cache.make_room(len(active))
                positions = on_device(fed, self.device)[:, None]
                rows = list(range(len(active)))
                logits = self._forward(tokens[:, None], positions, rows, [1] * len(rows))
            chosen.append(self._chosen(active, logits, step))
        self._extend(active, torch.stack(chosen, dim=1).tolist())
        for r in active:
            r.fed = len(r.prompt) + len(r.tokens) - 1
        _share(begin, active)

    def _until_a_look(self, active: list[Request]) -> int:
        """Decode steps until the host must know the tokens."""
        # Whoever watches logits sees each step; a paper's own rule may hold more at each.
        if self.on_logits or self.cache.policy.own_rule:
            return 1
        left = min(r.limit - len(r.tokens) for r in active)
        return min(left, LOOK_EVERY.get(self.device.type, 1))

    def _forward(
        self, tokens: Tensor, positions: Tensor, rows: list[int], counts: list[int]
    ) -> Tensor:
        self.cache.scheduled = (rows, counts)
        try:
            return forward(self.model, tokens, positions, self.cache)
        finally:
            self.cache.scheduled = None

    def _chosen(self, requests: list[Request], logits: Tensor, step: int) -> Tensor:
        """Each request's next token [A], from [A, V] logits; stays on the device."""
        if self.on_logits:
            for r, row in zip(requests, logits, strict=True):
                self.on_logits(r.index, len(r.tokens) + step, row)
        randoms = [r.random for r in requests]
        return choose(logits, self.chain, self.sampling.temperature == 0, randoms)

    def _extend(self, requests: list[Request], chosen: list[list[int]]) -> None:
        """Gives each request its new tokens, up to the one that ends it."""
        for r, tokens in zip(requests, chosen, strict=True):
            for token in tokens:
                if not self._finished(r):
                    r.choices.append(token)
                    r.tokens.append(token if r.forced is None else r.forced[len(r.tokens)])

    def _finished(self, r: Request) -> bool:
        return len(r.tokens) >= r.limit or self._stopped(r)

    def _stopped(self, r: Request) -> bool:
        return r.forced is None and bool(r.tokens) and r.tokens[-1] in self.stops

    def _generation(self, r: Request) -> Generation:
        return Generation(
            request=r.index,
            tokens=r.tokens,
            finish="stop" if self._stopped(r) else "length",
            prompt_tokens=len(r.prompt),
            seconds=r.seconds,
            max_slots=min(self.cache.max_slots(r.row), r.fed),
            budget_total=r.budget.total,
            asked_slots=r.budget.asked if isinstance(r.budget, Grant) else r.budget.total,
            cache_bytes=self.cache.cache_bytes(),
            state_bytes=self.cache.state_bytes(),
            choices=r.choices,
            trace=self._trace(r) if self.cache.trace_length else None,
        )

    def _trace(self, r: Request) -> EvictionTrace:
        # The last token was chosen but never processed: it has no keys, and no eviction time.
        fed = [*r.prompt, *r.tokens][: r.fed]
        times = torch.stack([layer.times(r.row, r.fed) for layer in self.cache.slot_layers])
        # Evicted only after the last token that counts: never.
        times = torch.where(times < r.fed, times, NEVER)
        return EvictionTrace(times[None], torch.tensor([fed]))


def _share(begin: float, requests: list[Request]) -> None:
    seconds = (time.perf_counter() - begin) / len(requests)
    for r in requests:
        r.seconds += seconds
