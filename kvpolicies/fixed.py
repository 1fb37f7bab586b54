"""A decode step whose shapes never change: what CUDA graphs and torch.compile need.

The eager step looks at the slots that are filled, so its shapes grow and its numbers come from the
host. Here a forward takes one token of every row of a bucket, writes it to the slot that a tensor
names, and attends over all slots under a mask; nothing waits for the device. What differs from step
to step stays outside, before and after it: eviction, observation and the host's counts, by the same
functions as in the eager step, so that policies do not know which step runs.

A bucket is a power of two. Its idle rows belong to nobody: they write to their slot 0, which is
taken anew when a request starts in them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicies.cache import FixedBudgetCache
from kvpolicies.config import MODES
from kvpolicies.errors import UserError
from kvpolicies.policy import Observation, Policy
from kvpolicies.rows import Counts, Move
from kvpolicies.slots import SlotGroup
from kvpolicies.step import LayerInput, attend_fixed
from kvpolicies.transfer import on_device

Forward = Callable[[Tensor, Tensor], Tensor]


class FixedStep:
    """The decode step of one bucket.

    Args:
        cache: allocated; its first `rows` rows are the bucket.
        forward: (tokens [R, 1], positions [R, 1]) -> logits [R, V], the model inside `attach`.
        mode: one of MODES but "eager".
    """

    def __init__(self, cache: FixedBudgetCache, rows: int, forward: Forward, mode: str):
        self.cache, self.rows = cache, rows
        device = cache.groups[0].positions.device
        self.tokens, self.positions = torch.zeros(2, rows, 1, dtype=torch.long, device=device)
        # Where each row's token goes, in the layers of each group.
        self.slots = [torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in cache.groups]
        # What the policy is shown once the forward is through, by layer.
        self.recorded: dict[str, dict[int, Tensor]] = {"queries": {}, "weights": {}, "hidden": {}}
        self._in_graph = mode != "fixed" and device.type == "cuda"
        self._graph: Any = None
        self._logits: Tensor | None = None
        self._run = _compiled(forward) if mode == "compiled" else forward

    def step(self, tokens: Tensor, seen: Sequence[int]) -> Tensor:
        """One token [A] of each of the first A rows; logits [A, V], float32.

        `seen` are the tokens that each row has processed so far, which is the new one's position.
        """
        active = len(seen)
        device, idle = self.tokens.device, [0] * (self.rows - active)
        self.tokens[:active, 0] = tokens
        self.positions[:, 0] = on_device([*seen, *idle], device)
        for slots, group in zip(self.slots, self.cache.groups, strict=True):
            free = [group.rows.slot_for_next(row) for row in range(active)]
            slots[:, 0] = on_device([*free, *idle], device)
        self.cache.begin(Counts.of_a_step(active), scheduled=True, fixed=self)
        assert self.cache.forward is not None
        moves = self.cache.forward.moves
        logits = self._replayed() if self._in_graph else self._call()
        for group, plan in zip(self.cache.groups, moves, strict=True):
            if group.observes:
                for move in plan:
                    self._observe(group, move)
        self.cache.finish()
        return logits[:active].float()

    def _observe(self, group: SlotGroup, move: Move) -> None:
        part, filled = move.rows, max(move.lengths)
        for y, layer in enumerate(group.layers):
            weights, hidden = (self.recorded[kind].get(layer) for kind in ("weights", "hidden"))
            step = Observation(
                self.recorded["queries"][layer][part],
                self.positions[part],
                None if weights is None else weights[part, ..., :filled],
                None if hidden is None else hidden[part],
            )
            group.observe(y, move, step)

    def attend(self, layer: int, given: LayerInput) -> Tensor:
        """One layer's part of the step: see `step.attend_fixed`."""
        group, y = self.cache.layer_index[layer]
        return attend_fixed(
            *(self.cache.groups[group], y, given),
            *(self.slots[group], self.positions, self.recorded),
        )

    def _call(self) -> Tensor:
        # Cleared here, so that a compiled forward always meets them empty.
        for kind in self.recorded.values():
            kind.clear()
        return self._run(self.tokens, self.positions)

    def _replayed(self) -> Tensor:
        """The graph's logits; captured at the first call, after warming up."""
        if self._graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # each writes the same tokens to the same slots
                    self._call()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._call()
        self._graph.replay()
        assert self._logits is not None
        return self._logits


def _compiled(forward: Forward) -> Forward:
    """`forward` by torch.compile; dynamo is imported only here, for it takes its time."""
    from torch._dynamo import config

    run = torch.compile(forward, dynamic=False)

    def within_limits(tokens: Tensor, positions: Tensor) -> Tensor:
        # Every generation has a cache of its own, hence a compilation of its own. What a policy
        # reads may come through hooks, which differ from one generation to the next.
        with config.patch(
            recompile_limit=1 << 10,
            accumulated_recompile_limit=1 << 12,
            skip_nnmodule_hook_guards=False,
        ):
            return run(tokens, positions)

    return within_limits


class FixedSteps:
    """The decode steps of all buckets, made when first needed."""

    def __init__(self, cache: FixedBudgetCache, forward: Forward, mode: str):
        self.cache, self.forward, self.mode = cache, forward, mode
        self._steps: dict[int, FixedStep] = {}

    def step(self, tokens: Tensor, seen: Sequence[int]) -> Tensor:
        """One token of each of the first rows, by the bucket that holds them: `FixedStep.step`."""
        rows = bucket(len(seen), self.cache.rows)
        if rows not in self._steps:
            self._steps[rows] = FixedStep(self.cache, rows, self.forward, self.mode)
        return self._steps[rows].step(tokens, seen)


def bucket(active: int, rows: int) -> int:
    """The smallest power of two that holds `active` rows, at most `rows`."""
    size = 1
    while size < active:
        size *= 2
    return min(size, rows)


def check_mode(mode: str, policy: Policy, device: torch.device) -> str:
    """The mode that "auto" stands for, or `mode` itself.

    Raises:
        UserError: if decode steps cannot run in this mode.
    """
    if mode == "auto":
        return "graph" if device.type == "cuda" and _fixable(policy) else "eager"
    if mode not in MODES:
        raise UserError(f"step must be auto, {', '.join(MODES)}, got {mode!r}")
    if mode == "graph" and device.type != "cuda":
        raise UserError(f"step='graph' is a CUDA graph; on {device.type} use eager or compiled")
    if mode != "eager" and not _fixable(policy):
        raise UserError(f"policy {policy} runs with step='eager' only")
    return mode


def _fixable(policy: Policy) -> bool:
    return not policy.rerotates
