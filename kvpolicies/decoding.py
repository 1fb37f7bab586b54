"""The one decode loop: every policy runs through these lines and no others.

Prompts wait in a queue; each free row of the batch takes the next one (a row always costs the same
memory), is prefilled in steps that its budget can hold, and decodes with the others until it stops.
A request's tokens and evictions do not depend on its company.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvpolicies.adapter import attach, decode_forward, forward
from kvpolicies.admission import Request, admit
from kvpolicies.budget import Budget, Grant
from kvpolicies.cache import FixedBudgetCache
from kvpolicies.fixed import FixedSteps, check_mode
from kvpolicies.generation import Generation
from kvpolicies.policy import Policy, whole
from kvpolicies.recording import record
from kvpolicies.registry import resolve
from kvpolicies.sampling import Sampling, choose
from kvpolicies.trace import EvictionTrace

OnLogits = Callable[[int, int, Tensor], None]


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    policy: Policy | str,
    budget: Budget | str | int,
    *,
    max_new_tokens: int | Sequence[int],
    batch_size: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    request_ids: Sequence[int] | None = None,
    forced: Sequence[Sequence[int]] | None = None,
    on_logits: OnLogits | None = None,
    on_finish: Callable[[int, Generation], None] | None = None,
    trace: bool = False,
    progress: str | None = None,
    step: str = "auto",
) -> list[Generation]:
    """Generates from every prompt under one policy and one budget.

    Args:
        model: a transformers decoder; put back as it was on return.
        prompts: token ids of each prompt, at least one token each.
        policy: a policy or its spec, such as `"beacon(n_beacon=8)"`.
        budget: slots of a KV head, or a ratio such as `"25%"` of prompt + max_new_tokens, taken
            for each prompt; `full` needs none and gets prompt + max_new_tokens.
        max_new_tokens: one limit, or one a prompt.
        batch_size: rows decoded together (default: all prompts); the others wait.
        eos_token_id: stop tokens (default: the model's generation config).
        temperature, top_p, top_k: sampling; temperature 0 is greedy.
        seed: with `request_ids` (default: the prompt's index) it fixes a request's random numbers,
            whatever its batch.
        forced: teacher forcing: these new tokens are fed instead of the model's own choices. A
            policy that looks ahead (oracle) needs them: a full run over them is recorded first,
            whose time counts as nobody's.
        on_logits: called as (prompt index, step, logits [V] float32) for each new token.
        on_finish: called as (prompt index, Generation) when a prompt is done.
        trace: record eviction times.
        progress: show a progress bar with this label.
        step: how decode steps run: "eager"; "fixed" shapes; "graph", these in CUDA graphs;
            "compiled" by torch.compile; "auto": graph on CUDA, else eager (see fixed.py).

    Returns:
        one Generation a prompt, in order.

    Raises:
        ValueError: for an unknown policy, an impossible budget, an empty prompt, an unsupported
            model, or NaN in a score; before anything runs where that can be known.
    """
    chosen: Policy = resolve(policy)
    sampling = Sampling(temperature, top_p, top_k, seed)
    requests = admit(
        chosen,
        prompts,
        budget,
        max_new_tokens,
        sampling,
        request_ids or range(len(prompts)),
        forced,
    )
    if not requests:
        return []
    if batch_size is not None:
        whole(batch_size, 1, "batch_size")
    longest = max(len(r.prompt) + r.limit for r in requests)
    cache = FixedBudgetCache(
        model,
        chosen,
        [r.budget for r in requests],
        slots=min(longest, max(r.budget.total for r in requests)),
        max_length=longest,
        trace=trace,
    )
    mode = check_mode(step, chosen, next(model.parameters()).device)
    loop = _Loop(model, cache, sampling, _stop_tokens(model, eos_token_id), on_logits, mode)
    done: dict[int, Generation] = {}
    bar = tqdm(total=len(requests), desc=progress, leave=False) if progress else nullcontext()
    training = model.training
    model.eval()
    try:
        with attach(model, cache), bar as shown:
            for request, generation in loop.run(requests, batch_size or len(requests)):
                done[request] = generation
                if on_finish:
                    on_finish(request, generation)
                if shown is not None:
                    shown.update()
    finally:
        model.train(training)
    return [done[i] for i in range(len(requests))]


class _Loop:
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
        self.fixed = None if mode == "eager" else FixedSteps(cache, decode_forward(model), mode)
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
                self._advance(active, [1] * len(active), decoding=True)

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

    def _advance(self, requests: list[Request], counts: list[int], decoding: bool = False) -> None:
        """One forward: counts[i] tokens of each request; a new token where the prompt is done.

        `decoding`: these are all the requests that hold a row, and their rows are the first ones.
        """
        begin = time.perf_counter()
        width = max(counts)
        tokens, positions = [], []
        for r, n in zip(requests, counts, strict=True):
            padding = [0] * (width - n)
            tokens.append(padding + r.next_tokens(n))
            positions.append([*padding, *range(r.fed, r.fed + n)])
            r.fed += n
        rows = [r.row for r in requests]
        if self.fixed and decoding:
            logits = self.fixed.step([t for (t,) in tokens], [p for (p,) in positions])
        else:
            self.cache.scheduled = (rows, counts)
            try:
                batch = torch.tensor([tokens, positions], device=self.device)
                logits = forward(self.model, batch[0], batch[1], self.cache)
            finally:
                self.cache.scheduled = None
        ready = [i for i, r in enumerate(requests) if not r.waiting]
        if ready:
            every = len(ready) == len(requests)
            self._extend([requests[i] for i in ready], logits if every else logits[ready])
        share = (time.perf_counter() - begin) / len(requests)
        for r in requests:
            r.seconds += share

    def _extend(self, requests: list[Request], logits: Tensor) -> None:
        """Gives each request its next token, from [A, V] logits."""
        if self.on_logits:
            for r, row in zip(requests, logits, strict=True):
                self.on_logits(r.index, len(r.tokens), row)
        randoms = [r.random for r in requests]
        chosen = choose(logits, self.chain, self.sampling.temperature == 0, randoms)
        for r, token in zip(requests, chosen, strict=True):
            r.choices.append(token)
            r.tokens.append(token if r.forced is None else r.forced[len(r.tokens)])

    def _finished(self, r: Request) -> bool:
        return len(r.tokens) >= r.limit or (r.forced is None and r.tokens[-1] in self.stops)

    def _generation(self, r: Request) -> Generation:
        stopped = r.forced is None and bool(r.tokens) and r.tokens[-1] in self.stops
        return Generation(
            request=r.index,
            tokens=r.tokens,
            finish="stop" if stopped else "length",
            prompt_tokens=len(r.prompt),
            seconds=r.seconds,
            max_slots=self.cache.max_slots(r.row),
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
        return EvictionTrace(times[None].clone(), torch.tensor([fed]))


def _stop_tokens(model: Any, given: int | Sequence[int] | None) -> frozenset[int]:
    if given is None:
        given = model.generation_config.eos_token_id
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)
