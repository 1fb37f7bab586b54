"""Random sequences for comparing an implementation with the references.

All arrays hold float32 values (in float64), so that both sides see the same inputs. Those of
`draw_whole` are small whole numbers, whose products are exact in float32 too, in any order.
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


def _repeat_earlier(
    rng: np.random.Generator, x: Array, share: float, *, once: bool = False
) -> None:
    """Make about `share` of the tokens of x [..., T, D] exact copies of an earlier one.

    `once`: of one that is no copy and has none.
    """
    single = [0]
    for t in range(1, x.shape[-2]):
        if rng.random() < share and single:
            source = single.pop(rng.integers(len(single))) if once else rng.integers(t)
            x[..., t, :] = x[..., source, :]
        else:
            single.append(t)


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
    topics: int = 0,
) -> Stream:
    """Normal queries (times `sharpness`) and keys, rotated at their positions.

    `tied_keys`: the share of *rotated* keys that equal an earlier one, in every head, so that
    scores tie exactly; `tied_queries`: likewise of the queries before RoPE, for ties in
    farthest-point sampling. `topics`: the queries lie around so many directions.
    """
    rope = rotary(dim, base)
    qpre = sharpness * rng.standard_normal((heads, group, tokens, dim))
    if topics:
        centres = sharpness * rng.standard_normal((heads, group, topics, dim))
        qpre = 0.3 * qpre + centres[:, :, rng.integers(topics, size=tokens)]
    qpre = _rounded(qpre)
    _repeat_earlier(rng, qpre, tied_queries)
    k = _rounded(_rotated(rng.standard_normal((heads, tokens, dim)), rope))
    _repeat_earlier(rng, k, tied_keys)
    return Stream(k=k, q=_rounded(_rotated(qpre, rope)), qpre=qpre, rope=rope, prompt=prompt)


def quarter_turns(dim: int) -> Rope:
    """A rotation by whole quarter turns, which leaves whole numbers whole.

    Pair i makes i + 1 quarter turns a position; the layout is that of `rotary`.
    """
    half = dim // 2
    cosines = np.array([1.0, 0.0, -1.0, 0.0])

    def rope(x: Array, position: int) -> Array:
        turns = position * np.arange(1, half + 1)
        cos, sin = cosines[turns % 4], cosines[(turns - 1) % 4]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    return rope


def draw_whole(
    rng: np.random.Generator,
    *,
    heads: int = 2,
    group: int = 2,
    tokens: int = 96,
    dim: int = 16,
    prompt: int = 40,
    one_hot: bool = False,
    repeated: float = 0.2,
) -> Stream:
    """Whole numbers, before as after rotation: with `dim` 4, 16 or 64 every logit is dyadic.

    Queries are +-1, and keys too, so that all cosines are dyadic. With `one_hot` queries are +-128
    and keys multiples of 64, as large as products in float32 allow: a query's weights are 1 for
    one key, or 1/2 for a key and its copy, and 0 for the others, in float32 as in float64, for the
    next logit is more than exp can bridge.
    `repeated`: the share of tokens whose rotated key, and whose query before RoPE, equals an
    earlier one (of keys with `one_hot`, one that was not repeated yet).
    """
    rope = quarter_turns(dim)
    qpre = rng.choice([-1.0, 1.0], (heads, group, tokens, dim)) * (128 if one_hot else 1)
    sizes = heads, tokens, dim
    most = 2**23 // dim
    k = 64.0 * rng.integers(-most, most, sizes) if one_hot else rng.choice([-1.0, 1.0], sizes)
    _repeat_earlier(rng, qpre, repeated)
    _repeat_earlier(rng, k, repeated, once=one_hot)
    return Stream(k=k, q=_rotated(qpre, rope), qpre=qpre, rope=rope, prompt=prompt)
