"""The decode loop for requests that come and go: a cache for any of them up to one length.

    with serving(model, "beacon", 1024, rows=8, max_length=4096) as engine:
        engine.loop.add(engine.request(0, prompt, 64, Sampling()))
        while engine.loop.busy:
            for event in engine.loop.advance():
                print(event.tokens)

It is the loop of `generate`, with the same tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvpolicies.adapter import attach
from kvpolicies.admission import Request, admit, asked_for, scheduled_layers
from kvpolicies.architecture import inspect_model
from kvpolicies.budget import AnyBudget, Budget
from kvpolicies.cache import FixedBudgetCache
from kvpolicies.decoding import stop_set
from kvpolicies.errors import UserError, whole
from kvpolicies.fixed import check_mode
from kvpolicies.layer_shares import EVEN
from kvpolicies.loop import Loop
from kvpolicies.policy import Policy, check_deployable, each
from kvpolicies.registry import resolve
from kvpolicies.sampling import Sampling


@dataclass(frozen=True)
class Engine:
    """A loop without requests yet, and what a request must know of it."""

    loop: Loop
    """The decode loop: `add` a request, then `advance` and read its events (loop.py)."""
    policy: Policy
    """The one policy of all requests."""
    budget: AnyBudget
    """As `generate` takes it."""
    rows: int
    """Sequences decoded at once."""
    max_length: int
    """Most tokens of a prompt and its answer."""

    def request(self, index: int, prompt: Sequence[int], limit: int, sampling: Sampling) -> Request:
        """A request for `loop.add`; any thread may make it.

        It gets what `generate` gives to a single prompt: random numbers by its seed alone, and a
        ratio of prompt + limit where the budget is a ratio.

        Args:
            index: names the request in events.
            prompt: token ids, at least one.
            limit: most new tokens.
            sampling: of this request alone.

        Raises:
            UserError: for an empty prompt, one that is too long, or a budget impossible for it.
        """
        layers = self.loop.cache.shape.evicted
        (request,) = admit(self.policy, [prompt], self.budget, limit, sampling, [0], None, layers)
        if len(request.prompt) + limit > self.max_length:
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens and {limit} new ones are more than "
                f"the {self.max_length} tokens of max_length"
            )
        request.index = index
        return request

    def cache_bytes(self) -> int:
        """Bytes of keys, values and positions, all rows and layers."""
        return self.rows * self.loop.cache.cache_bytes()

    def state_bytes(self) -> int:
        """Bytes of the policy's own tensors, all rows and layers."""
        return self.rows * self.loop.cache.state_bytes()


@contextmanager
def serving(
    model: Any,
    policy: Policy | str,
    budget: AnyBudget,
    *,
    rows: int,
    max_length: int,
    eos_token_id: int | Sequence[int] | None = None,
    step: str = "auto",
    prefill_chunk: int | None = None,
) -> Iterator[Engine]:
    """Allocates a cache of `rows` rows, and attaches the model to it inside the `with` block.

    Args:
        model: a transformers decoder in evaluation mode.
        policy: as `generate` takes it.
        budget: as `generate` takes it.
        rows: sequences decoded at once.
        max_length: most tokens of a prompt and its answer; `full` holds as many slots.
        eos_token_id: as `generate` takes it.
        step: as `generate` takes it.
        prefill_chunk: most prompt tokens between two tokens of the rows that decode. A policy that
            evicts takes one step of its budget a row instead: the slots that are free, later half
            the top-k. None: prompts come in whole.

    Raises:
        UserError: for what cannot run, the memory that is lacking included.
    """
    chosen: Policy = resolve(policy)
    check_deployable(chosen)
    whole(rows, 1, "rows")
    whole(max_length, 2, "max_length")
    if prefill_chunk is not None:
        whole(prefill_chunk, 1, "prefill_chunk")
    mode = check_mode(step, chosen, next(model.parameters()).device)
    largest = asked_for(chosen, budget, max_length, max_length)
    if largest.layers != EVEN and chosen.evicts:
        _check_fixed(chosen, budget)
    layers = inspect_model(model, chosen).evicted
    schedule = scheduled_layers(chosen, largest, 1, max_length - 1, layers)
    # What a paper's own rule holds follows from the prompt, but is never more than the sequence.
    most = max(one.capacity for one in each(schedule))
    slots = max_length if chosen.own_rule else min(max_length, most)
    cache = FixedBudgetCache(
        model, chosen, [schedule], slots=slots, max_length=max_length, kv_dtype=largest.kv_dtype
    )
    with attach(model, cache), torch.no_grad():
        stops = stop_set(model, eos_token_id)
        loop = _allocated(model, cache, rows, stops, mode, prefill_chunk)
        yield Engine(loop, chosen, budget, rows, max_length)


def _check_fixed(policy: Policy, budget: AnyBudget) -> None:
    """Raises UserError where requests would differ in how layers share a budget: slots of a layer
    are allocated once, before any request is there."""
    spec = Budget.parse(budget, length=1 << 20)
    shorter = Budget.parse(budget, length=1 << 19)
    if policy.own_rule or spec.keeps_prompt or spec.total != shorter.total:
        raise UserError(
            f"layers {spec.layers}: a server needs a budget that is the same for every request: "
            "a number of slots, no share, no sinks: prompt, no paper's own rule"
        )


def _allocated(
    model: Any,
    cache: FixedBudgetCache,
    rows: int,
    stops: frozenset[int],
    mode: str,
    chunk: int | None,
) -> Loop:
    try:
        return Loop(model, cache, rows, stops, None, mode, chunk)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, UserError) or "memory" not in str(error):
            raise
        raise UserError(
            f"no memory for {rows} rows of {cache.slots} slots: lower the budget, batch_size, or "
            f"max_length ({cache.max_length})"
        ) from None
