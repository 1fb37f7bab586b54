"""Which queries stand for many: farthest-point sampling and spherical k-means, slowly.

Everything reports how clear its decisions were: the smallest difference of cosines that decided
one, inf when none did. An exact tie has a rule, and does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.attention import Array, products, unit

ROUNDS = 10


def points(queries: Array) -> Array:
    """Queries [M, N, D] of M query heads that choose together -> [N, M D].

    Unit vectors side by side, over sqrt(M): the product of two time steps is the mean over the
    heads of their cosines.
    """
    heads, steps, _ = queries.shape
    return unit(queries).transpose(1, 0, 2).reshape(steps, -1) / np.sqrt(heads)


def _lowest(values: Array) -> tuple[int, float]:
    """The index of the lowest value [N] (ties: the smallest), and how far the next value is."""
    best = int(np.argmin(values))
    above = values[values > values[best]]
    return best, float(above.min() - values[best]) if len(above) else np.inf


def fps_with_gap(queries: Array, m: int) -> tuple[list[int], float]:
    """`fps`, and how clear it was."""
    if len(queries) <= m:
        return list(range(len(queries))), np.inf
    if m == 0:
        return [], np.inf
    units = unit(queries)
    # The cosine to the sum is proportional to the mean of the cosines: the order is the same.
    first, gap = _lowest(products(units.sum(axis=0), units) / len(units))
    chosen = [first]
    highest = products(units[first], units)
    while len(chosen) < m:
        highest[chosen[-1]] = np.inf
        following, clear = _lowest(highest)
        chosen.append(following)
        gap = min(gap, clear)
        highest = np.maximum(highest, products(units[following], units))
    return chosen, gap


def fps(queries: Array, m: int) -> list[int]:
    """Farthest-point sampling: indices of m of queries [N, D], in order of choice.

    First the query of the lowest mean cosine to all, then the one whose highest cosine to the
    chosen is lowest. Ties: the smaller index. With N <= m: all, in their order.
    """
    return fps_with_gap(queries, m)[0]


def _nearest(vectors: Array, to: Array) -> tuple[Array, float]:
    """For each of vectors [N, D] the index of the closest of `to` [M, D], and how clear."""
    cosines = products(vectors, to)
    best = cosines.max(axis=1)
    second = np.where(cosines < best[:, None], cosines, -np.inf).max(axis=1)
    return cosines.argmax(axis=1), float((best - second).min())


@dataclass(frozen=True)
class Clusters:
    """Of each cluster its members, and the query nearest to its centre (of all queries).

    `gap` is how clear the clusters were, `nearest_gap` how clear the nearest queries (of a pair,
    both are equally near but for rounding).
    """

    members: list[list[int]]
    nearest: list[int]
    gap: float
    nearest_gap: float


def kmeans(queries: Array, m: int) -> Clusters:
    """Spherical k-means of more than m > 0 queries [N, D] into m clusters, from the FPS choice.

    Ties: the smaller index.
    """
    units = unit(queries)
    chosen, gap = fps_with_gap(units, m)
    centres = units[chosen]
    cluster_of = np.full(len(units), -1)
    for rounds_done in range(ROUNDS + 1):
        before = cluster_of
        cluster_of, clear = _nearest(units, centres)
        gap = min(gap, clear)
        if rounds_done == ROUNDS or (cluster_of == before).all():
            break  # When nothing changed, no later round changes anything.
        for cluster in range(m):
            total = units[cluster_of == cluster].sum(axis=0)
            if total.any():
                centres[cluster] = unit(total[None])[0]
    members = [np.flatnonzero(cluster_of == cluster).tolist() for cluster in range(m)]
    nearest, nearest_gap = _nearest(centres, units)
    return Clusters(members, nearest.tolist(), gap, nearest_gap)
