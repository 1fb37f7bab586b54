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
from kvpolicies.errors import UserError
from kvpolicies.kernels.attention import Visible, slot_attention, slot_attention_with_weights
from kvpolicies.kernels.softmax import Softmax
from kvpolicies.layer import SlotLayer
from kvpolicies.policy import Policy, Step
from kvpolicies.transfer import on_device

MODES = ("eager", "fixed", "graph", "compiled")
"""`eager`: what is filled, as it is; `fixed`: fixed shapes, run eagerly; `graph`: these in a CUDA
graph; `compiled`: these by torch.compile, on a GPU in a graph too."""

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
        device = cache.slot_layers[0].positions.device
        self.tokens, self.positions = torch.zeros(2, rows, 1, dtype=torch.long, device=device)
        # Full layers fill alike, and so do sliding ones: two tensors name all slots.
        self.slots = {
            sliding: torch.zeros(rows, 1, dtype=torch.long, device=device)
            for sliding in (False, True)
        }
        self.queries: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self._in_graph = mode != "fixed" and device.type == "cuda"
        self._graph: Any = None
        self._logits: Tensor | None = None
        self._run = _compiled(forward) if mode == "compiled" else forward

    def step(self, tokens: Tensor, seen: Sequence[int]) -> Tensor:
        """One token [A] of each of the first A rows; logits [A, V], float32.

        `seen` are the tokens that each row has processed so far, which is the new one's position.
        """
        active = len(seen)
        part = slice(0, active)
        self.cache.make_room(active)
        idle = [0] * (self.rows - active)
        device = self.tokens.device
        self.tokens[:active, 0] = tokens
        self.positions[:, 0] = on_device([*seen, *idle], device)
        for store in self.cache.stores:
            layer = store.members[0]
            held = on_device([*layer.lengths[part], *idle], device)
            self.slots[layer.span is not None][:, 0] = held
        self.cache.fixed = self
        try:
            logits = self._replayed() if self._in_graph else self._call()
        finally:
            self.cache.fixed = None
        for layer in self.cache.slot_layers:
            layer.count(part, 1)
            if layer.policy.observes:
                self._observe(layer, part)
        return logits[part].float()

    def _observe(self, layer: SlotLayer, part: slice) -> None:
        view = layer.view(part)
        weights = self.weights.get(layer.index)
        if weights is not None:
            weights = weights[part, ..., : view.positions.shape[2]]
        queries, inputs = self.queries[layer.index][part], self.inputs.get(layer.index)
        inputs = None if inputs is None else inputs[part]
        layer.policy.observe(view, Step(queries, self.positions[part], weights, inputs))

    def attend(
        self,
        layer: SlotLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        softmax: Softmax,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Takes one token of every row into its slot and attends: [R, H, G, 1, D].

        `inputs` [R, 1, E] are the attention block's, where the policy wants them.
        """
        r, heads, d = self.rows, key.shape[1], key.shape[3]
        slot = self.slots[layer.span is not None]  # [R, 1]
        place = slot[:, None].expand(r, heads, 1)
        wide = place[..., None].expand(r, heads, 1, d)
        keys, values, positions = layer.keys[:r], layer.values[:r], layer.positions[:r]
        keys.scatter_(2, wide, key)
        values.scatter_(2, wide, value)
        new = self.positions[:, None].expand(r, heads, 1).to(positions.dtype)
        positions.scatter_(2, place, new)
        for tensor in layer.slot_state.values():
            tensor[:r].scatter_(2, place, torch.zeros_like(place, dtype=tensor.dtype))
        visible = Visible(slot)
        if layer.span is not None:
            visible = Visible(slot, self.positions - layer.span + 1, positions[:, 0])
        grouped = query.reshape(r, heads, -1, 1, d)
        self.queries[layer.index] = grouped
        if inputs is not None:
            self.inputs[layer.index] = inputs
        layer.softmax = softmax
        if not layer.policy.needs_attention:
            return slot_attention(grouped, keys, values, visible, softmax)
        out, self.weights[layer.index] = slot_attention_with_weights(
            grouped, keys, values, visible, softmax
        )
        return out

    def _call(self) -> Tensor:
        # Cleared here, so that a compiled forward always meets them empty.
        self.queries.clear()
        self.weights.clear()
        self.inputs.clear()
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
        # Every generation has a cache of its own, hence a compilation of its own.
        with config.patch(recompile_limit=1 << 10, accumulated_recompile_limit=1 << 12):
            return run(tokens, positions)

    return within_limits


class FixedSteps:
    """The decode steps of all buckets, made when first needed."""

    def __init__(self, cache: FixedBudgetCache, forward: Forward, mode: str):
        self.cache, self.forward, self.mode = cache, forward, mode
        self._steps: dict[int, FixedStep] = {}

    def step(self, tokens: Tensor, seen: Sequence[int]) -> Tensor:
        """See `FixedStep.step`."""
        rows = bucket(len(seen), self.cache.slot_layers[0].geometry.rows)
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
