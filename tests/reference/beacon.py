"""BeaconKV, slowly: which queries observe, and the score they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.reference.attention import Array, causal_rows
from tests.reference.buffers import Memory, QueryBuffer, RevisitBuffer, Select, WholeHistory
from tests.reference.rule import Budget, Observation, Policy, State, Stream, Terms
from tests.reference.selection import fps_with_gap, kmeans, points


def beacon_scores(
    keys: Array,
    positions: Array,
    queries: Array,
    sees: Array,
    pool: str = "max",
    temperature: float = 0.25,
) -> Array:
    """Attention pooled over the group's heads and the observing queries -> [L].

    keys [L, D], positions [L]; queries [G, N, D] already rotated; query n sees the keys at
    positions <= sees[n] ([N]). In a mean, a key that a query does not see counts as 0. `soft`
    is the mean of w^(1 / temperature), to the power of the temperature. No query: all 0.
    """
    if not len(sees):
        return np.zeros(len(keys))
    rows = causal_rows(queries, sees, keys, positions).reshape(-1, len(keys))
    highest = rows.max(axis=0)
    if pool == "max":
        return highest
    if pool == "mean":
        return rows.mean(axis=0)
    # Relative to the highest, so that no power underflows.
    relative = rows / np.where(highest > 0, highest, 1.0)
    return highest * np.mean(relative ** (1.0 / temperature), axis=0) ** temperature


@dataclass(frozen=True)
class Beacon(Policy):
    """beacon, with every option.

    selector: `continual`; `initial` (the first n_beacon queries, for ever); `naive_fps`,
    `kmeans_centroid` and `kmeans_nearest`, from the whole history.
    space: with `post_rope` queries are kept, selected and used as they were rotated at their own
    positions (and see every cached key); with `rerotate` they are only selected so, and observe
    rotated to the current position as in pre_rope.
    shared: the heads of a group choose the same time steps.
    """

    n_beacon: int = 16
    n_recent: int = 16
    pool: str = "max"
    temperature: float = 0.25
    selector: str = "continual"
    space: str = "pre_rope"
    shared: bool = False
    refresh: str = "beat"
    faithful: bool = False
    rerotate: bool = False

    def wish(self, total: int) -> int:
        """Down to seven eighths of the budget."""
        return total - 7 * total // 8

    def protected_newest(self, budget: Budget) -> int:
        return self.n_recent

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        """`faithful`: the prompt stays, an eighth of the other slots goes, recents alone stay."""
        if not self.faithful:
            return Terms(asked)
        budget = Budget(asked.total, prompt, self.n_recent)
        if budget.topk < 1:
            raise ValueError("the prompt and the recents alone fill the budget")
        rest = asked.total - prompt
        return Terms(budget, drop=max(1, min(rest - 7 * rest // 8, budget.topk)))

    def start(self, stream: Stream, budget: Budget) -> BeaconState:
        return BeaconState(self, stream, budget)


class BeaconState(State):
    """`buffers[h][c]`: what the choir c of KV head h remembers.

    A choir is a list of query heads of the group that choose together: one each, or all.
    """

    def __init__(self, policy: Beacon, stream: Stream, budget: Budget):
        super().__init__(stream)
        self.policy = policy
        self.vectors = stream.qpre if policy.space == "pre_rope" else stream.q
        heads = list(range(stream.group))
        self.choirs = [heads] if policy.shared else [[g] for g in heads]
        late_from = budget.total - policy.n_recent
        self.points = [[points(group[choir]) for choir in self.choirs] for group in self.vectors]
        self.buffers = [[self._memory(p, late_from) for p in choirs] for choirs in self.points]

    def _memory(self, vectors: Array, late_from: int) -> Memory:
        """An empty memory of heads whose time steps are `vectors` [T, D]."""
        policy = self.policy
        sizes = policy.n_beacon, policy.n_recent
        if policy.refresh == "revisit":
            return RevisitBuffer(*sizes, vectors)
        select = self._selector(vectors)
        if policy.selector in ("continual", "initial"):
            return QueryBuffer(*sizes, late_from, select)
        return WholeHistory(*sizes, select)

    def _selector(self, vectors: Array) -> Select:
        def initial(held: list[int], m: int) -> list[int]:
            return sorted(held)[:m]

        def farthest(held: list[int], m: int) -> list[int]:
            chosen, gap = fps_with_gap(vectors[held], m)
            self.gap = min(self.gap, gap)
            return [held[i] for i in chosen]

        def everything(held: list[int], m: int) -> list[int]:
            return held

        named: dict[str, Callable[[list[int], int], list[int]]] = {
            "initial": initial,
            "kmeans_centroid": everything,
            "kmeans_nearest": everything,
        }
        return named.get(self.policy.selector, farthest)

    def observe(self, event: Observation) -> None:
        for choirs in self.buffers:
            for buffer in choirs:
                buffer.observe(event.first, event.n, event.length_before)

    def _merged(self, h: int, c: int) -> list[list[int]]:
        """The beacons of a choir: each is the mean of the queries of so many time steps."""
        held, m = self.buffers[h][c].beacons, self.policy.n_beacon
        if not self.policy.selector.startswith("kmeans") or len(held) <= m:
            return [[b] for b in held]
        if m == 0:
            return []
        clusters = kmeans(self.points[h][c][held], m)
        self.gap = min(self.gap, clusters.gap)
        empty = not all(clusters.members)
        if self.policy.selector == "kmeans_nearest" or empty:
            self.gap = min(self.gap, clusters.nearest_gap)
        if self.policy.selector == "kmeans_nearest":
            return [[held[i]] for i in clusters.nearest]
        pairs = zip(clusters.members, clusters.nearest, strict=True)
        return [[held[i] for i in inside or [closest]] for inside, closest in pairs]

    def _observing(self, h: int, c: int, position: int) -> tuple[list[Array], Array]:
        """(queries [N, D] of each head of a choir, up to where each sees [N])."""
        buffer, merged = self.buffers[h][c], self._merged(h, c)
        turn = self.policy.space == "pre_rope" or self.policy.rerotate
        source = self.stream.qpre if self.policy.rerotate else self.vectors
        queries = []
        for g in self.choirs[c]:
            beacons = [source[h, g, steps].mean(axis=0) for steps in merged]
            if turn and beacons:
                beacons = list(self.stream.rope(np.array(beacons), position))
            queries.append(np.array(beacons + list(self.stream.q[h, g, buffer.late])))
        return queries, np.array([position] * len(merged) + buffer.late, dtype=int)

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        scores = []
        for h, kept in enumerate(cached):
            for buffer in self.buffers[h]:
                buffer.score()
                self.gap = min(self.gap, getattr(buffer, "gap", np.inf))
            observing = [self._observing(h, c, position) for c in range(len(self.choirs))]
            queries = np.array([rows for heads, _ in observing for rows in heads])
            # Beacons come from anywhere, but all heads hold as many and the same late ones.
            sees, policy = observing[0][1], self.policy
            pooling = policy.pool, policy.temperature
            scores.append(beacon_scores(self.stream.k[h, kept], kept, queries, sees, *pooling))
        return scores

    def evicted(self, kept: list[Array], position: int) -> None:
        for h, choirs in enumerate(self.buffers):
            for buffer in choirs:
                buffer.evicted(len(kept[h]))
