"""What each kind of scorer declares: what it reads, when, and what it carries along a sequence.

A new kind is an entry here, its net, and its policy: nothing else asks for a kind by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ScorerConfig = Any
"""`config.ScorerConfig`, whose module reads this one."""
CHUNK = 64
"""Tokens that a memory takes in between two states that are kept."""


def _nothing(config: ScorerConfig) -> dict[str, tuple[int, ...]]:
    return {}


def _mlstm(config: ScorerConfig) -> dict[str, tuple[int, ...]]:
    h, m = config.heads, config.memory
    return {"memory": (h, m, m), "normaliser": (h, m), "scale": (h,)}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of scorer."""

    net: str
    """ "module:Class" of a layer's net."""
    needs_input: bool = False
    """Reads the attention's input instead of keys and values."""
    needs_groups: bool = False
    """Has weights for each query head of a KV head."""
    lag: Callable[[ScorerConfig], int] = lambda config: 0
    """Tokens after which a token is scored."""
    state_shapes: Callable[[ScorerConfig], Mapping[str, tuple[int, ...]]] = _nothing
    """Shapes of what is carried along a sequence, float32, all zero when it begins."""
    memory: Callable[[int], int] | None = None
    """M by default, from the head dimension D; None = it has no memory."""
    hidden: Callable[[int], int] | None = None
    """Hidden units by default, from D; None = it has none."""
    held: Callable[[ScorerConfig, int], int] = lambda config, tokens: 0
    """Numbers that a layer's training holds for so many tokens, beside its weights."""
    same_order: bool = True
    """Orders tokens the same at any age; else a token's score falls at a rate of its own."""


KINDS: dict[str, Kind] = {
    "kvpop": Kind(
        net="kvpolicies.learned.scorer:MemoryRead",
        lag=lambda c: c.window if c.delay else 0,
        state_shapes=_mlstm,
        memory=lambda d: d,
        held=lambda c, n: c.heads * n * (3 * c.memory + c.memory * c.memory // CHUNK),
    ),
    "kvpop_mlp": Kind(
        net="kvpolicies.learned.nets:HeadMLP",
        hidden=lambda d: 2 * d,
        held=lambda c, n: 3 * c.heads * n * c.hidden,
    ),
    "dms": Kind(net="kvpolicies.learned.nets:Adapter", needs_input=True, lag=lambda c: 1),
    "trimkv": Kind(
        net="kvpolicies.learned.nets:Gate",
        needs_input=True,
        hidden=lambda d: 512,
        held=lambda c, n: 3 * n * c.hidden,
        same_order=False,
    ),
    "kvzap": Kind(
        net="kvpolicies.learned.kvzip:LogScore",
        needs_input=True,
        hidden=lambda d: 0,
        held=lambda c, n: 2 * n * c.hidden,
    ),
    "fastkvzip": Kind(
        net="kvpolicies.learned.kvzip:SinkGate",
        needs_input=True,
        needs_groups=True,
        hidden=lambda d: 16,
        held=lambda c, n: n * c.heads * c.groups * (3 * c.hidden + 3 * 16),
    ),
}
