"""The score of every training-free policy as a pure function: higher stays.

Each takes what is cached, in any slot order, and the queries that observe it. The cards are
those of the papers named beside each function; where the project's eviction rule is more
precise than a paper, the rule is what stands here.
"""

from __future__ import annotations

import numpy as np

from tests.reference.attention import (
    Array,
    attention_row,
    average_pool,
    causal_rows,
    logits,
    max_pool,
    products,
    softmax,
    unit,
)


def streaming_scores(positions: Array) -> Array:
    """StreamingLLM: the score is the position [L]; the sinks are protected by the rule."""
    return positions.astype(float)


def tova_scores(keys: Array, queries: Array) -> Array:
    """TOVA: attention of the newest query, mean over all query heads of the layer -> [L].

    keys [H, L, D] and queries [H, G, D]; slot l is the same token in every head.
    """
    heads, group, _ = queries.shape
    total = np.zeros(keys.shape[1])
    for h in range(heads):
        for row in attention_row(queries[h], keys[h]):
            total += row
    return total / (heads * group)


def snapkv_scores(
    keys: Array, positions: Array, queries: Array, query_positions: Array, kernel: int = 5
) -> Array:
    """SnapKV, decode form: max over the group of pooled attention sums -> [L].

    keys [L, D], queries [G, N, D] with their positions [N]. Per query head: causal softmax over
    all cached keys, sum over the queries, average-pool over the keys older than all of them, with
    zeros beyond the ends. A key that is not older scores +inf.
    """
    older = positions < query_positions.min()
    scores = np.full(len(positions), np.inf)
    if older.any():
        sums = causal_rows(queries, query_positions, keys, positions).sum(axis=1)
        pooled = [average_pool(of_head[older], positions[older], kernel) for of_head in sums]
        scores[older] = np.max(pooled, axis=0)
    return scores


def rpc_scores(
    keys: Array,
    positions: Array,
    queries: Array,
    query_positions: Array,
    kernel: int = 7,
    first: int = 0,
) -> Array:
    """RPC: attention of the newest queries on what is older than all of them -> [L].

    keys [H, L, D], queries [H, G, N, D], positions [N]; slot l is the same token in every head.
    Softmax over the older keys from position `first` on, sum over the queries, mean over all query
    heads, average-pool over these keys with zeros beyond the ends. Another key scores +inf.
    """
    heads, group = queries.shape[:2]
    older = (first <= positions) & (positions < query_positions.min())
    total = np.zeros(len(positions))
    for h in range(heads):
        for g in range(group):
            total += attention_row(queries[h, g], keys[h], older).sum(axis=0)
    scores = np.full(len(positions), np.inf)
    scores[older] = average_pool(total[older] / (heads * group), positions[older], kernel)
    return scores


def rkv_importance(
    keys: Array, positions: Array, queries: Array, query_positions: Array, kernel: int = 7
) -> Array:
    """R-KV's I [L]: keys [L, D], queries [G, N, D], their positions [N].

    Logits, maximum over the group, softmax over the keys older than all the queries, mean over
    the queries, max-pool over the older keys. A key that is not older gets 0.
    """
    older = positions < query_positions.min()
    importance = np.zeros(len(positions))
    if not older.any():
        return importance
    rows = softmax(logits(queries, keys[older]).max(axis=0))
    importance[older] = max_pool(rows.mean(axis=0), positions[older], kernel)
    return importance


def _cosines(keys: Array) -> Array:
    """Cosine of every pair of keys [L, D], the diagonal 0 -> [L, L]."""
    units = unit(keys)
    cosines = products(units, units)
    np.fill_diagonal(cosines, 0.0)
    return cosines


def rkv_redundancy(keys: Array, positions: Array, beta: int = 1, threshold: float = 0.5) -> Array:
    """R-KV's R [L]: softmax over tokens of the mean cosine to the others, keys [L, D].

    In row i, the entries of its `beta` largest-position neighbours whose cosine is above the
    threshold (strictly) are zeroed: they are the copies that should stay.
    """
    cosines = _cosines(keys)
    for row in cosines:
        alike = np.flatnonzero(row > threshold)
        newest_first = sorted(alike, key=lambda j: -positions[j])
        row[newest_first[:beta]] = 0.0
    return softmax(cosines.mean(axis=0))


def rkv_threshold_gap(keys: Array, threshold: float = 0.5) -> float:
    """How near any pair of keys [L, D] comes to the threshold that decides a zeroing."""
    return float(np.abs(_cosines(keys) - threshold).min())


def rkv_scores(
    keys: Array,
    positions: Array,
    queries: Array,
    query_positions: Array,
    lam: float = 0.1,
    beta: int = 1,
    threshold: float = 0.5,
    kernel: int = 7,
) -> Array:
    """R-KV: lam I - (1 - lam) R -> [L]; arguments as in its two parts."""
    importance = rkv_importance(keys, positions, queries, query_positions, kernel)
    redundancy = rkv_redundancy(keys, positions, beta, threshold)
    return lam * importance - (1.0 - lam) * redundancy


def keydiff_scores(keys: Array) -> Array:
    """KeyDiff: minus the cosine of a key to the mean of the normalised keys [L, D] -> [L]."""
    units = unit(keys)
    return -(units * unit(units.mean(axis=0, keepdims=True))).sum(axis=-1)


def lazy_update(
    attention: Array, step: int, last: Array, longest: Array, alpha: float
) -> tuple[Array, Array]:
    """LazyEviction's TS [L] and MRI [L] after the query of `step` gave `attention` [L]."""
    looked = attention >= alpha
    return np.where(looked, step, last), np.where(looked, np.maximum(longest, step - last), longest)


def lazy_scores(step: int, last: Array, longest: Array) -> Array:
    """LazyEviction: 2 / (1 + e^(1 + (t - TS) / (MRI + 1e-5))) at step t, and, for a token that
    recurred, 2 / (1 + e^(MRI - 1)) more; from TS [L] and MRI [L] -> [L]."""
    scores = np.zeros(len(last))
    for j, (ts, mri) in enumerate(zip(last, longest, strict=True)):
        scores[j] = _falling(1.0 + (step - ts) / (mri + 1e-5))
        if mri > 0:
            scores[j] += _falling(mri - 1.0)
    return scores


def _falling(x: float) -> float:
    """2 / (1 + e^x) for x >= 0, where e^x may be more than a number holds."""
    return float(2.0 * np.exp(-x) / (1.0 + np.exp(-x)))
