"""Attention of one query, rotary embedding and pooling, in float64 numpy.

The slow references are written for reading, not for speed: one head, one query at a time.
A logit is the row sum of `keys * query`, never a matrix product, so that two equal keys get
two exactly equal logits and a tie stays a tie.

Shapes: H KV heads, G query heads per KV head, L cached slots of one head, D head size,
N observation queries, T tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Rope = Callable[[Array, int], Array]
EPS = 1e-12


def rotary(dim: int, base: float = 10000.0) -> Rope:
    """The function (x [..., D], position) -> x rotated: half-split pairs (i, i + D/2).

    out = x cos(position f) + rotate_half(x) sin(position f), f_i = base^(-2i/D) and
    rotate_half(x) = (-x[D/2:], x[:D/2]).
    """
    if dim % 2:
        raise ValueError(f"rotary needs an even head size, got {dim}")
    half = dim // 2
    frequency = base ** (-2.0 * np.arange(half) / dim)

    def rope(x: Array, position: int) -> Array:
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    return rope


def logits(query: Array, keys: Array) -> Array:
    """query [D] · keys [L, D] / sqrt(D) -> [L]."""
    return (keys * query).sum(axis=-1) / np.sqrt(keys.shape[-1])


def softmax(values: Array, seen: Array | None = None) -> Array:
    """Softmax of values [L] over the slots marked in seen [L] (default all); 0 elsewhere.

    All zeros when nothing is seen.
    """
    seen = np.ones(len(values), dtype=bool) if seen is None else seen
    weights = np.zeros(len(values))
    if seen.any():
        weights[seen] = np.exp(values[seen] - values[seen].max())
        weights /= weights.sum()
    return weights


def attention_row(query: Array, keys: Array, seen: Array | None = None) -> Array:
    """What query [D] gives to each of keys [L, D] -> [L]; see `softmax` for seen."""
    return softmax(logits(query, keys), seen)


def causal_rows(queries: Array, query_positions: Array, keys: Array, positions: Array) -> Array:
    """One attention row per query [N, D] over keys [L, D] -> [N, L].

    A query at position tau sees the keys whose position is at most tau.
    """
    rows = [
        attention_row(query, keys, positions <= tau)
        for query, tau in zip(queries, query_positions, strict=True)
    ]
    return np.array(rows).reshape(len(queries), len(keys))


def unit(vectors: Array) -> Array:
    """vectors [N, D] divided by their L2 norms, a norm being at least 1e-12."""
    norms = np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    return vectors / np.maximum(norms, EPS)


def _windows(positions: Array, kernel: int) -> list[tuple[int, Array]]:
    """(slot, slots of its pooling window) for each slot, neighbours in position order."""
    order = np.argsort(positions, kind="stable")
    reach = kernel // 2
    return [
        (int(slot), order[max(0, rank - reach) : rank + reach + 1])
        for rank, slot in enumerate(order)
    ]


def average_pool(values: Array, positions: Array, kernel: int) -> Array:
    """Mean over `kernel` (odd) neighbours in position order -> [L].

    Beyond either end lie zeros: the sum is divided by `kernel` always.
    """
    pooled = np.zeros(len(values))
    for slot, window in _windows(positions, kernel):
        pooled[slot] = sum(float(values[i]) for i in window) / kernel
    return pooled


def max_pool(values: Array, positions: Array, kernel: int) -> Array:
    """Maximum over `kernel` (odd) neighbours in position order, ignoring the outside -> [L]."""
    pooled = np.zeros(len(values))
    for slot, window in _windows(positions, kernel):
        pooled[slot] = max(float(values[i]) for i in window)
    return pooled
