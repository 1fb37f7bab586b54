"""Speed and memory of policies on one model: the same prompts, the same loop, one table.

Prompts are random tokens, nothing stops early. Prefill and decoding are told apart by a run of one
token; each figure is the best of `repeats` runs, for what disturbs a run only makes it slower. On a
shared machine compare rows of one run with each other, never with another run's.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvpolicies.decoding import Generation, generate
from kvpolicies.errors import UserError
from kvpolicies.eval.clock import PARTS, split
from kvpolicies.eval.memory import Memory, largest_batch, predict
from kvpolicies.registry import resolve

THEIRS = "transformers"
"""A row's policy that stands for transformers' own generation with a full cache."""


@dataclass(frozen=True)
class Load:
    """What is run: so many rows, prompts and new tokens of so many tokens."""

    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Row:
    """One policy at one budget under one load."""

    policy: str
    budget: str
    batch: int
    prompt: int
    new: int
    first_token_s: float
    """Seconds until every row has its first token."""
    tokens_s: float
    """New tokens a second, all rows, prefill apart."""
    cache_bytes: int
    state_bytes: int
    peak_bytes: int | None
    """Most bytes allocated on the GPU during the run; None on a CPU."""
    predicted_bytes: int
    fits: int | None
    """Rows that fit into the memory asked about."""
    split: dict[str, float] | None
    """Share of a decode step by part."""

    def flat(self) -> dict[str, Any]:
        """The row for a CSV."""
        values = asdict(self)
        parts = values.pop("split") or {}
        return {**values, **{f"share_{part}": parts.get(part) for part in PARTS}}


def measure(
    model: Any,
    policy: str,
    budget: str,
    load: Load,
    *,
    repeats: int = 2,
    with_split: bool = True,
    memory: int | None = None,
) -> Row:
    """Runs one cell.

    Args:
        budget: as `generate` takes it; unused for `full` and `transformers`.
        memory: bytes to fill when asking for the largest batch.
    """
    device = next(model.parameters()).device
    prompts = _prompts(model, load)
    run = _ours(model, policy, budget, prompts)
    if policy == THEIRS:
        run = _theirs(model, prompts)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first = min(_seconds(lambda: run(1), device) for _ in range(repeats))
    whole = min(_seconds(lambda: run(load.new), device) for _ in range(repeats))
    held = predict(
        model, "full" if policy == THEIRS else policy, budget, load.batch, load.prompt, load.new
    )
    parts = None
    if with_split and policy != THEIRS:
        parts = _split(model, policy, budget, prompts, load)
    return Row(
        policy=policy,
        budget="" if policy in ("full", THEIRS) else budget,
        batch=load.batch,
        prompt=load.prompt,
        new=load.new,
        first_token_s=round(first, 4),
        tokens_s=round(load.batch * (load.new - 1) / max(1e-9, whole - first), 2),
        cache_bytes=held.cache,
        state_bytes=held.state,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        predicted_bytes=held.total,
        fits=None if memory is None else largest_batch(held, memory),
        split=parts,
    )


def measure_all(
    model: Any,
    policies: list[str],
    budgets: list[str],
    loads: list[Load],
    on_cell: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> Iterator[Row]:
    """Every policy at every budget under every load; what needs no budget runs once a load."""
    for load in loads:
        for policy in policies:
            for budget in budgets[:1] if policy in ("full", THEIRS) else budgets:
                on_cell(f"{policy} @ {budget}, batch {load.batch}")
                yield measure(model, policy, budget, load, **options)


def largest_batch_by_trying(
    model: Any, policy: str, budget: str, load: Load, most: int = 4096
) -> int:
    """Rows whose cache can really be allocated on the GPU, by bisection.

    Raises:
        UserError: on a CPU, where memory that is asked for is not yet memory that is there.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise UserError("the largest batch by trying needs a GPU; use the prediction elsewhere")
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(model, policy, budget, Load(middle, load.prompt, load.new)):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(model: Any, policy: str, budget: str, load: Load) -> bool:
    try:
        generate(model, _prompts(model, load), policy, budget, max_new_tokens=2, eos_token_id=-1)
        held: Memory = predict(model, policy, budget, load.batch, load.prompt, load.new)
        block = torch.empty(held.cache + held.state, dtype=torch.uint8, device="cuda")
        del block
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()


def _prompts(model: Any, load: Load) -> list[list[int]]:
    words = model.get_output_embeddings().weight.shape[0]
    g = torch.Generator().manual_seed(0)
    return torch.randint(3, words, (load.batch, load.prompt), generator=g).tolist()


def _ours(
    model: Any, policy: str, budget: str, prompts: list[list[int]]
) -> Callable[[int], list[Generation] | None]:
    if policy != THEIRS:
        resolve(policy)
    return lambda new: generate(model, prompts, policy, budget, max_new_tokens=new, eos_token_id=-1)


@torch.no_grad()
def _theirs(model: Any, prompts: list[list[int]]) -> Callable[[int], None]:
    ids = torch.tensor(prompts, device=next(model.parameters()).device)

    def run(new: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )

    return run


def _split(
    model: Any, policy: str, budget: str, prompts: list[list[int]], load: Load
) -> dict[str, float]:
    """Shares over the whole run, prefill included, which a long run makes small."""
    device = next(model.parameters()).device
    with split(resolve(policy), device) as seconds:
        generate(model, prompts, policy, budget, max_new_tokens=load.new, eos_token_id=-1)
    whole = sum(seconds.values())
    return {part: round(value / whole, 4) for part, value in seconds.items()}


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
