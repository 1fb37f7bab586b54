"""What one prompt became: the result of the decode loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpolicies.layer_shares import mean
from kvpolicies.policy import each
from kvpolicies.trace import NEVER, EvictionTrace

if TYPE_CHECKING:
    from kvpolicies.admission import Request
    from kvpolicies.cache import FixedBudgetCache


@dataclass(frozen=True)
class Generation:
    """What one prompt became."""

    request: int
    """Index of the prompt."""
    tokens: list[int]
    """New tokens, the stop token included."""
    finish: str
    """"stop" (a stop token) or "length"."""
    prompt_tokens: int
    """Tokens of the prompt."""
    seconds: float
    """Its share of the wall clock: a forward's time is divided equally among its rows."""
    max_slots: int
    """The most slots any KV head held; where layers share unevenly, the mean over them (which is
    above the budget if and only if their sum is)."""
    budget_total: int
    """Slots of its budget, by a paper's own rule where that was chosen; of layers, their mean."""
    asked_slots: int
    """Slots that were asked for; fewer than `budget_total` under a paper's own rule only."""
    cache_bytes: int
    """Keys, values and positions of its row, all layers, as allocated."""
    state_bytes: int
    """The policy's own tensors of its row, all layers."""
    choices: list[int]
    """What the model chose at each step: its tokens, unless others were forced."""
    trace: EvictionTrace | None = None
    """Eviction times of prompt and new tokens, if they were asked for."""
    processor: float = 0.0
    """As `seconds`, of the processor: all threads of this process, and nothing of others."""


def finished(cache: FixedBudgetCache, request: Request, finish: str) -> Generation:
    """What a request became that has come to its end in its row of the cache."""
    r = request
    return Generation(
        request=r.index,
        tokens=r.tokens,
        finish=finish,
        prompt_tokens=len(r.prompt),
        seconds=r.seconds,
        processor=r.processor,
        max_slots=cache.max_slots(r.row, r.fed),
        budget_total=mean([s.capacity for s in each(r.schedule)]),
        asked_slots=r.budget.total,
        cache_bytes=cache.cache_bytes(),
        state_bytes=cache.state_bytes(),
        choices=r.choices,
        trace=_trace(cache, r) if cache.trace_length else None,
    )


def _trace(cache: FixedBudgetCache, r: Request) -> EvictionTrace:
    # The last token was chosen but never processed: it has no keys, and no eviction time.
    fed = [*r.prompt, *r.tokens][: r.fed]
    times = cache.times(r.row, r.fed)
    # Evicted only after the last token that counts: never.
    times = torch.where(times < r.fed, times, NEVER)
    prompt, last = torch.tensor([len(r.prompt)]), torch.tensor([r.tokens[-1]])
    return EvictionTrace(times[None], torch.tensor([fed]), prompt, last, cache.kv_dtype)
