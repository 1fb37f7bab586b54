"""Generation from many prompts under one policy: the entry to the one decode loop (loop.py)."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tqdm import tqdm

from kvpolicies.adapter import attach
from kvpolicies.admission import admit
from kvpolicies.architecture import inspect_model
from kvpolicies.budget import AnyBudget
from kvpolicies.cache import FixedBudgetCache
from kvpolicies.errors import whole
from kvpolicies.fixed import check_mode
from kvpolicies.generation import Generation
from kvpolicies.loop import Loop, OnLogits
from kvpolicies.policy import Geometry, Policy, each
from kvpolicies.positions import check_positions, check_words
from kvpolicies.registry import resolve
from kvpolicies.sampling import Sampling


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    policy: Policy | str,
    budget: AnyBudget,
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
    charge_state: bool = False,
) -> list[Generation]:
    """Generates from every prompt under one policy and one budget.

    Args:
        model: a transformers decoder; put back as it was on return.
        prompts: token ids of each prompt, at least one token each.
        policy: a policy or its spec, such as `"beacon(n_beacon=8)"`.
        budget: slots of a KV head, or a ratio such as `"25%"` of prompt + max_new_tokens, taken
            for each prompt; `full` needs none and gets prompt + max_new_tokens. `"266:int8"` stores
            keys and values in int8, `"133:pyramid"` shares slots out among layers (BudgetSpec).
        max_new_tokens: one limit, or one a prompt.
        batch_size: rows decoded together (default: all prompts); the others wait.
        eos_token_id: stop tokens (default: the model's generation config).
        temperature: of sampling; 0 is greedy.
        top_p: sample among the likeliest tokens that together have this probability.
        top_k: sample among so many likeliest tokens; 0 = off.
        seed: fixes a request's random numbers, whatever its batch.
        request_ids: what else fixes them, a number a prompt (default: its index).
        forced: teacher forcing: these new tokens are fed instead of the model's own choices. A
            policy that looks ahead (oracle) needs them: a full run over them is recorded first,
            whose time counts as nobody's.
        on_logits: called as (prompt index, step, logits [V] float32) for each new token.
        on_finish: called as (prompt index, Generation) when a prompt is done.
        trace: record eviction times.
        progress: show a progress bar with this label.
        step: how decode steps run: "eager"; "fixed" shapes; "graph", these in CUDA graphs;
            "compiled" by torch.compile; "auto": graph on CUDA, else eager (see fixed.py).
        charge_state: each policy gives up the slots that its own state is worth (charging.py).

    Returns:
        one Generation a prompt, in order.

    Raises:
        ValueError: for an unknown policy, an impossible budget, an empty prompt, an unsupported
            model, a prompt longer than its positions, or NaN in a score or in logits; before
            anything runs where that can be known.
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
        inspect_model(model, chosen).evicted,
        _sizes(model, chosen) if charge_state else None,
    )
    if not requests:
        return []
    if batch_size is not None:
        whole(batch_size, 1, "batch_size")
    longest = max(len(r.prompt) + r.limit for r in requests)
    prompt = max(len(r.prompt) for r in requests)
    cache = FixedBudgetCache(
        model,
        chosen,
        [r.schedule for r in requests],
        slots=min(longest, max(s.capacity for r in requests for s in each(r.schedule))),
        max_length=longest,
        trace=trace,
        kv_dtype=requests[0].budget.kv_dtype,
    )  # refuses a model that cannot run at all
    check_positions(model, prompt, longest - prompt)
    for r in requests:
        check_words(model, [*r.prompt, *(r.forced or [])], f"prompt {r.index}")
    mode = check_mode(step, chosen, next(model.parameters()).device)
    rows = min(batch_size or len(requests), len(requests))
    loop = Loop(model, cache, rows, stop_set(model, eos_token_id), on_logits, mode)
    done: dict[int, Generation] = {}
    bar = tqdm(total=len(requests), desc=progress, leave=False) if progress else nullcontext()
    training = model.training
    model.eval()
    try:
        with attach(model, cache), bar as shown:
            for request, generation in loop.run(requests):
                done[request] = generation
                if on_finish:
                    on_finish(request, generation)
                if shown is not None:
                    shown.update()
    finally:
        model.train(training)
    return [done[i] for i in range(len(requests))]


def stop_set(model: Any, given: int | Sequence[int] | None) -> frozenset[int]:
    """The tokens that end a request: those given, else the model's generation config's.

    Raises:
        UserError: for what is no token id there.
    """
    if given is None:
        return frozenset(configured_stops(model))
    return frozenset([given] if isinstance(given, int) else given)


def configured_stops(model: Any) -> list[int]:
    """The tokens that the model's generation config ends an answer with.

    Raises:
        UserError: for what is no token id there.
    """
    named = model.generation_config.eos_token_id
    stops = [] if named is None else list(named) if isinstance(named, list | tuple) else [named]
    for token in stops:
        whole(token, 0, "the model's generation config: eos_token_id")
    return stops


def _sizes(model: Any, policy: Policy) -> Geometry:
    s, weight = inspect_model(model, policy), next(model.parameters())
    return Geometry(1, s.heads, s.groups, 0, s.head_dim, weight.dtype, weight.device)
