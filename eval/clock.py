"""Where a decode step's time goes: model, attention, observe, score, compact.

Inside the `with` block the functions of the step are wrapped by a stopwatch, and put back after it.
On a GPU every lap waits for the device, so the laps are right and the whole is slower than it is
without a clock: tokens/s come from runs without one.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvpolicies import adapter, cache, fixed, loop, steps, store
from kvpolicies.policy import Policy

PARTS = ("model", "attention", "observe", "score", "compact", "rest")
"""`model`: the forward without what follows; `score`: the policy's scores and the choice of slots;
`compact`: moving slots and what the policy does after it; `rest`: appending and bookkeeping."""


@contextmanager
def split(policy: Policy, device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds by part of all decode steps after the last prefill, filled while the block runs."""
    seconds: defaultdict[str, float] = defaultdict(float)
    open_parts: list[str] = []

    def timed(function: Callable[..., Any], part: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            open_parts.append(part)
            begin = _now(device)
            try:
                return function(*args, **kwargs)
            finally:
                lap = _now(device) - begin
                open_parts.pop()
                seconds[part] += lap
                if open_parts:  # what contains this part does not count it twice
                    seconds[open_parts[-1]] -= lap

        return run

    prefill = loop.Loop._prefill

    def apart(self: Any, new: list[Any]) -> None:
        prefill(self, new)
        if new:
            seconds.clear()  # decode steps are asked about

    kind = type(policy)
    laps: list[tuple[Any, str, str]] = [
        (loop, "forward", "model"),
        (fixed.FixedStep, "_replayed", "model"),
        (fixed.FixedStep, "_call", "model"),
        (cache.FixedBudgetCache, "make_room", "rest"),
        (adapter, "process", "rest"),
        (steps, "slot_attention", "attention"),
        (steps, "slot_attention_with_weights", "attention"),
        (kind, "observe", "observe"),
        (kind, "scores", "score"),
        (store, "choose_victims", "score"),
        (store, "compact", "compact"),
        (kind, "evicted", "compact"),
    ]
    patched = [*[(owner, name) for owner, name, _ in laps], (loop.Loop, "_prefill")]
    before = [(owner, name, owner.__dict__.get(name)) for owner, name in patched]
    for owner, name, part in laps:
        setattr(owner, name, timed(getattr(owner, name), part))
    setattr(loop.Loop, "_prefill", apart)  # noqa: B010
    shares: dict[str, float] = {}
    try:
        yield shares
    finally:
        for owner, name, original in before:
            if original is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        shares.update({part: seconds[part] for part in PARTS})


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
