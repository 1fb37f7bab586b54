"""Attention of one query, rotary embedding and pooling, in float64 numpy.

The slow references are written for reading, not for speed: plain loops over heads and steps.
A logit is a sum of products of its own, never part of a matrix product, so that two equal keys
get two exactly equal logits and a tie stays a tie.

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


def products(queries: Array, keys: Array) -> Array:
    """queries [..., D] · keys [L, D] -> [..., L], each product summed on its own.

    A matrix product may sum equal rows in different orders; here equal keys tie exactly.
    """
    return np.einsum("...d,ld->...l", queries, keys, optimize=False)


def logits(queries: Array, keys: Array) -> Array:
    """queries [..., D] · keys [L, D] / sqrt(D) -> [..., L]."""
    return products(queries, keys) / np.sqrt(keys.shape[-1])


def softmax(values: Array, seen: Array | None = None) -> Array:
    """Softmax of values [..., L] over the slots marked in seen [..., L] (default all).

    0 elsewhere; all zeros when nothing is seen.
    """
    seen = np.broadcast_to(np.array(True) if seen is None else seen, values.shape)
    highest = np.max(values, axis=-1, keepdims=True, where=seen, initial=-np.inf)
    weights = np.exp(np.where(seen, values, -np.inf) - np.where(highest > -np.inf, highest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def attention_row(query: Array, keys: Array, seen: Array | None = None) -> Array:
    """What query [..., D] gives to each of keys [L, D] -> [..., L]; see `softmax` for seen."""
    return softmax(logits(query, keys), seen)


def causal_rows(queries: Array, query_positions: Array, keys: Array, positions: Array) -> Array:
    """One attention row per query [..., N, D] over keys [L, D] -> [..., N, L].

    A query at position tau ([N]) sees the keys whose position ([L]) is at most tau.
    """
    return attention_row(queries, keys, positions[None, :] <= query_positions[:, None])


def unit(vectors: Array) -> Array:
    """vectors [N, D] divided by their L2 norms, a norm being at least 1e-12."""
    norms = np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    return vectors / np.maximum(norms, EPS)


def _windows(values: Array, positions: Array, kernel: int, outside: float) -> tuple[Array, Array]:
    """(order, windows [L, kernel]): slots in position order, and the values around each."""
    order = np.argsort(positions, kind="stable")
    if not len(order):
        return order, np.zeros((0, kernel))
    padded = np.pad(values[order], kernel // 2, constant_values=outside)
    return order, np.lib.stride_tricks.sliding_window_view(padded, kernel)


def average_pool(values: Array, positions: Array, kernel: int) -> Array:
    """Mean over `kernel` (odd) neighbours in position order -> [L].

    Beyond either end lie zeros: the sum is divided by `kernel` always.
    """
    pooled = np.zeros(len(values))
    order, windows = _windows(values, positions, kernel, 0.0)
    pooled[order] = windows.sum(axis=-1) / kernel
    return pooled


def max_pool(values: Array, positions: Array, kernel: int) -> Array:
    """Maximum over `kernel` (odd) neighbours in position order, ignoring the outside -> [L]."""
    pooled = np.zeros(len(values))
    order, windows = _windows(values, positions, kernel, -np.inf)
    pooled[order] = windows.max(axis=-1)
    return pooled
