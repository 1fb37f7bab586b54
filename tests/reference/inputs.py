"""Random sequences for comparing an implementation with the references.

All arrays hold float32 values (in float64), so that both sides see the same inputs.
"""

from __future__ import annotations

import numpy as np

from tests.reference.attention import Array, Rope, rotary
from tests.reference.rule import Stream


def _rounded(x: Array) -> Array:
    return x.astype(np.float32).astype(np.float64)


def _rotated(x: Array, rope: Rope) -> Array:
    """x [..., T, D], each token rotated to its own position."""
    return np.stack([rope(x[..., t, :], t) for t in range(x.shape[-2])], axis=-2)


def _repeat_earlier(rng: np.random.Generator, x: Array, share: float) -> None:
    """Make about `share` of the tokens of x [..., T, D] exact copies of an earlier one."""
    for t in range(1, x.shape[-2]):
        if rng.random() < share:
            x[..., t, :] = x[..., rng.integers(t), :]


def draw(
    rng: np.random.Generator,
    *,
    heads: int = 2,
    group: int = 2,
    tokens: int = 96,
    dim: int = 8,
    prompt: int = 40,
    base: float = 10000.0,
    sharpness: float = 2.0,
    tied_keys: float = 0.0,
    tied_queries: float = 0.0,
) -> Stream:
    """Normal queries (times `sharpness`) and keys, rotated at their positions.

    `tied_keys`: the share of *rotated* keys that equal an earlier one, in every head, so that
    scores tie exactly; `tied_queries`: likewise of the queries before RoPE, for ties in
    farthest-point sampling.
    """
    rope = rotary(dim, base)
    qpre = _rounded(sharpness * rng.standard_normal((heads, group, tokens, dim)))
    _repeat_earlier(rng, qpre, tied_queries)
    k = _rounded(_rotated(rng.standard_normal((heads, tokens, dim)), rope))
    _repeat_earlier(rng, k, tied_keys)
    return Stream(k=k, q=_rounded(_rotated(qpre, rope)), qpre=qpre, rope=rope, prompt=prompt)
