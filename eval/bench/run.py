"""Speed and memory of policies on one model: the same prompts, the same loop, one table.

Prompts are random tokens, nothing stops early. Each figure is of the fastest windows of `repeats`
runs (laps.py). On a shared machine compare rows of one run with each other, never with another
run's.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvpolicies.budget import AnyBudget
from kvpolicies.decoding import generate
from kvpolicies.eval.bench.profiler import PARTS, split
from kvpolicies.eval.bench.timing import fastest, stopwatch, watched
from kvpolicies.models.memory import Load, largest_batch, largest_batch_by_allocation, predict
from kvpolicies.registry import resolve

THEIRS = "transformers"
"""A row's policy that stands for transformers' own generation with a full cache."""


@dataclass(frozen=True)
class BenchRow:
    """One `policy` at one `budget` under one load: `batch`, `prompt` and `new` as in `Load`.

    `cache_bytes` and `state_bytes` are those of all rows, and `predicted_bytes` is all that a batch
    takes, weights included: all three by arithmetic (`predict`).
    """

    policy: str
    budget: str
    batch: int
    prompt: int
    new: int
    first_token_s: float
    """Seconds until every row has its first token."""
    first_step_s: float
    """Seconds of the first decode step: capturing a graph or compiling included."""
    tokens_s: float
    """New tokens a second, all rows, prefill and first step apart."""
    step_cpu_ms: float
    """Processor time of a decode step, all threads: what other processes take is not in it."""
    cache_bytes: int
    state_bytes: int
    peak_bytes: int | None
    """Most bytes allocated on the GPU during the run; None on a CPU."""
    predicted_bytes: int
    fits: int | None
    """Rows that fit into the memory asked about, by arithmetic."""
    fits_tried: int | None
    """The same, by allocating them; None on a CPU, where memory given is not yet memory there."""
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
    budget: AnyBudget,
    load: Load,
    *,
    repeats: int = 2,
    step: str = "auto",
    with_split: bool = True,
    memory: int | None = None,
) -> BenchRow:
    """Runs one cell.

    Args:
        budget: as `generate` takes it; unused for `full` and `transformers`.
        memory: bytes to fill when asking for the largest batch.
    """
    device = next(model.parameters()).device
    prompts = _prompts(model, load)
    run = _theirs if policy == THEIRS else _ours(policy, budget, step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs = []
    for _ in range(repeats):
        marks, mark = stopwatch(device)
        mark(0)
        run(model, prompts, load.new, mark)
        runs.append(marks)
    speed = fastest(runs)
    held = predict(
        model, "full" if policy == THEIRS else policy, budget, load.batch, load.prompt, load.new
    )
    parts = None
    if with_split and policy != THEIRS:
        parts = _split(model, policy, budget, prompts, load)
    return BenchRow(
        policy=policy,
        budget="" if policy in ("full", THEIRS) else str(budget),
        batch=load.batch,
        prompt=load.prompt,
        new=load.new,
        first_token_s=round(speed.first_token_s, 4),
        first_step_s=round(speed.first_step_s, 4),
        tokens_s=round(load.batch * speed.steps / speed.wall, 2),
        step_cpu_ms=round(1000 * speed.cpu / speed.steps, 3),
        cache_bytes=held.cache,
        state_bytes=held.state,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        predicted_bytes=held.total,
        fits=None if memory is None else largest_batch(held, memory),
        fits_tried=_tried(model, policy, budget, load, memory),
        split=parts,
    )


def _tried(
    model: Any, policy: str, budget: AnyBudget, load: Load, memory: int | None
) -> int | None:
    if memory is None or next(model.parameters()).device.type != "cuda":
        return None
    name = "full" if policy == THEIRS else policy
    return largest_batch_by_allocation(model, name, budget, load.prompt, load.new, memory)


def _prompts(model: Any, load: Load) -> list[list[int]]:
    words = model.get_output_embeddings().weight.shape[0]
    g = torch.Generator().manual_seed(0)
    return torch.randint(3, words, (load.batch, load.prompt), generator=g).tolist()


def _ours(policy: str, budget: AnyBudget, step: str) -> Callable[..., None]:
    def run(model: Any, prompts: list[list[int]], new: int, mark: Callable[[int], None]) -> None:
        with watched(mark):
            generate(model, prompts, policy, budget, max_new_tokens=new, eos_token_id=-1, step=step)

    return run


@torch.no_grad()
def _theirs(model: Any, prompts: list[list[int]], new: int, mark: Callable[[int], None]) -> None:
    ids = torch.tensor(prompts, device=next(model.parameters()).device)

    def look(tokens: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
        mark(tokens.shape[1] - ids.shape[1])
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[look],
    )


def _split(
    model: Any, policy: str, budget: AnyBudget, prompts: list[list[int]], load: Load
) -> dict[str, float]:
    """Shares of the decode steps."""
    device = next(model.parameters()).device
    with split(resolve(policy), device) as seconds:
        generate(model, prompts, policy, budget, max_new_tokens=load.new, eos_token_id=-1)
    whole = sum(seconds.values())
    return {part: round(value / whole, 4) for part, value in seconds.items()}
