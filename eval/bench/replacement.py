"""Finished rows handed to waiting prompts, against static batches: what a full batch is worth.

A static batch, as transformers' own generation runs it, steps until its longest row is done, and
the others step along for nothing. Here the same requests, in the same order, run once in one queue
and once in static batches of as many rows. Only tokens that were asked for count.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvpolicies.budget import AnyBudget
from kvpolicies.decoding import generate
from kvpolicies.errors import UserError


@dataclass(frozen=True)
class Queue:
    """Requests whose numbers of new tokens have a long tail."""

    requests: int
    shortest: int
    longest: int
    prompt: int
    batch: int

    def lengths(self) -> list[int]:
        """New tokens of each request: log-uniform, the longest among them, seeded."""
        g = torch.Generator().manual_seed(0)
        share = torch.rand(self.requests, generator=g, dtype=torch.float64)
        lengths = self.shortest * (share * math.log(self.longest / self.shortest)).exp()
        drawn = [round(n) for n in lengths.tolist()]
        drawn[self.requests // 2] = self.longest
        return drawn


@dataclass(frozen=True)
class Throughput:
    """One policy at one budget: both ways to run the same requests."""

    policy: str
    budget: str
    requests: int
    batch: int
    new_tokens: int
    """Of all requests together."""
    tokens_s: float
    """With finished rows replaced; prefill included, as on the other side."""
    static_tokens_s: float
    """In static batches."""

    def flat(self) -> dict[str, Any]:
        """The row for a table."""
        return {**asdict(self), "gain": round(self.tokens_s / self.static_tokens_s, 3)}


def parse_tail(text: str) -> tuple[int, int]:
    """Reads `"50:2000"`, the shortest and the longest request.

    Raises:
        UserError: for anything else.
    """
    low, _, high = text.partition(":")
    if text.isascii() and low.isdigit() and high.isdigit() and 2 <= int(low) < int(high):
        return int(low), int(high)
    raise UserError(f"--tail {text!r}: expected shortest:longest new tokens, such as 50:2000")


def serve(
    model: Any,
    policy: str,
    budget: AnyBudget,
    queue: Queue,
    step: str,
    on_run: Callable[[str], None],
) -> Throughput:
    """Runs the requests both ways, once each."""
    lengths, g = queue.lengths(), torch.Generator().manual_seed(0)
    words = model.get_output_embeddings().weight.shape[0]
    prompts = torch.randint(3, words, (queue.requests, queue.prompt), generator=g).tolist()

    def seconds(batches: list[slice], limits: list[int]) -> float:
        begin = time.perf_counter()
        for part in batches:
            generate(
                model, prompts[part], policy, budget, max_new_tokens=limits[part],
                batch_size=queue.batch, eos_token_id=-1, step=step,
            )  # fmt: skip
        return time.perf_counter() - begin

    static = [slice(i, i + queue.batch) for i in range(0, queue.requests, queue.batch)]
    to_the_end = [n for part in static for n in [max(lengths[part])] * len(lengths[part])]
    on_run(f"{policy} @ {budget}: rows replaced")
    replaced = seconds([slice(0, queue.requests)], lengths)
    on_run(f"{policy} @ {budget}: static batches")
    stepping = seconds(static, to_the_end)
    total = sum(lengths)
    return Throughput(
        policy, "" if policy == "full" else str(budget), queue.requests, queue.batch, total,
        round(total / replaced, 2), round(total / stepping, 2),
    )  # fmt: skip
