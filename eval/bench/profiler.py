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

from kvpolicies import cache, fixed, loop, slots, step
from kvpolicies.policy import Policy

PARTS = ("model", "attention", "observe", "score", "compact", "rest")
"""`model`: the forward without what follows; `score`: the policy's scores and the choice of slots;
`compact`: moving slots and what the policy does after it; `rest`: appending and bookkeeping."""


@contextmanager
def split(policy: Policy, device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds by part of all decode steps after the last prefill, filled when the block ends."""
    clock, shares = _Clock(device), dict[str, float]()
    patched: list[tuple[Any, str, Any]] = [
        (owner, name, clock.timed(getattr(owner, name), part))
        for owner, name, part in _laps(type(policy))
    ]
    patched.append((loop.Loop, "_prefill", clock.restarted_after(loop.Loop._prefill)))
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in patched]
    for owner, name, function in patched:
        setattr(owner, name, function)
    try:
        yield shares
    finally:
        for owner, name, original in before:
            if original is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        shares.update({part: clock.seconds[part] for part in PARTS})


def _laps(kind: type[Policy]) -> list[tuple[Any, str, str]]:
    """(owner, name, part) of the functions that are timed."""
    return [
        (loop, "forward", "model"),
        (fixed.FixedStep, "_replayed", "model"),
        (fixed.FixedStep, "_call", "model"),
        (cache.FixedBudgetCache, "begin", "rest"),
        (cache.FixedBudgetCache, "attend", "rest"),
        (step, "slot_attention", "attention"),
        (step, "slot_attention_with_weights", "attention"),
        (kind, "observe", "observe"),
        (kind, "scores", "score"),
        (slots, "choose_victims", "score"),
        (slots, "compact", "compact"),
        (kind, "evicted", "compact"),
    ]


class _Clock:
    """Seconds by part; a part inside another is not counted twice."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, its time added to `part`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._open.append(part)
            begin = _now(self.device)
            try:
                return function(*args, **kwargs)
            finally:
                lap = _now(self.device) - begin
                self._open.pop()
                self.seconds[part] += lap
                if self._open:
                    self.seconds[self._open[-1]] -= lap

        return run

    def restarted_after(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        """The loop's prefill, after which all seconds are zero: decode steps are asked about."""

        def run(owner: Any) -> Any:
            if came := prefill(owner):
                self.seconds.clear()
            return came

        return run


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
