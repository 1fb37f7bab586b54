"""When each new token came, within one run; and the fastest of several runs, window by window.

A run's own clock tells prefill, the first decode step (which captures or compiles) and all later
steps apart. What disturbs a shared machine comes and goes within seconds, and only ever makes
things slower: so the runs are cut into windows of steps, long enough that each holds whatever a
policy does now and then, and the fastest run of each window counts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from kvpolicies import loop

WINDOW = 128
"""Decode steps a window; R-KV evicts once in so many."""


class Mark(NamedTuple):
    """A moment of a run: new tokens a row so far, seconds on the wall, seconds of the processor."""

    tokens: int
    wall: float
    cpu: float


class Speed(NamedTuple):
    """Times of the fastest windows of some runs of equal lengths."""

    first_token_s: float
    first_step_s: float
    """Of the first run: what is compiled then may serve the others."""
    steps: int
    """Decode steps after the first look at new tokens."""
    wall: float
    """Seconds that these steps took."""
    cpu: float
    """The processor's seconds, all threads."""


def stopwatch(device: torch.device) -> tuple[list[Mark], Callable[[int], None]]:
    """Marks, and the function that adds one (it waits for the device)."""
    marks: list[Mark] = []

    def mark(tokens: int) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(Mark(tokens, time.perf_counter(), time.process_time()))

    return marks, mark


@contextmanager
def watched(mark: Callable[[int], None]) -> Iterator[None]:
    """Inside, the decode loop marks the end of prefill and every look at new tokens.

    All prompts must be admitted at once, and end at once.
    """
    prefill, decode = loop.Loop._prefill, loop.Loop._decode

    def prefilled(self: Any) -> bool:
        if came := prefill(self):
            mark(1)
        return came

    def decoded(self: Any, active: list[Any]) -> None:
        decode(self, active)
        mark(len(active[0].tokens))

    setattr(loop.Loop, "_prefill", prefilled)  # noqa: B010
    setattr(loop.Loop, "_decode", decoded)  # noqa: B010
    try:
        yield
    finally:
        setattr(loop.Loop, "_prefill", prefill)  # noqa: B010
        setattr(loop.Loop, "_decode", decode)  # noqa: B010


def fastest(runs: Sequence[Sequence[Mark]], window: int = WINDOW) -> Speed:
    """The figures of runs whose marks are alike; each begins with a mark of no tokens."""
    ends = _ends([mark.tokens for mark in runs[0]], window)
    wall = cpu = 0.0
    for a, b in pairwise(ends):
        wall += min(run[b].wall - run[a].wall for run in runs)
        cpu += min(run[b].cpu - run[a].cpu for run in runs)
    return Speed(
        min(run[1].wall - run[0].wall for run in runs),
        runs[0][2].wall - runs[0][1].wall,
        runs[0][ends[-1]].tokens - runs[0][ends[0]].tokens,
        wall,
        cpu,
    )


def _ends(tokens: list[int], window: int) -> list[int]:
    """Indices of the marks that cut a run into windows, from the first decode step's end on."""
    ends = [2]
    for index in range(3, len(tokens)):
        if tokens[index] - tokens[ends[-1]] >= window:
            ends.append(index)
    if ends[-1] != len(tokens) - 1:
        ends.append(len(tokens) - 1)
    return ends
