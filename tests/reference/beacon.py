"""BeaconKV, slowly: farthest-point sampling, the buffer of queries, the score.

A buffer holds the *positions* of its queries; the vectors are read from the whole sequence,
which an implementation does not have. That makes the buffer easy to check by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.reference.attention import Array, attention_row, unit
from tests.reference.rule import Budget, Observation, Policy, State, Stream

Select = Callable[[list[int], int], list[int]]


def _closest(candidates: Sequence[int], values: Array) -> tuple[int, float]:
    """The candidate of the lowest value (ties: the smallest index), and how clear that was.

    The second is the distance to the next candidate, inf when there is none or when it ties
    exactly: an exact tie has a rule.
    """
    best = min(candidates, key=lambda i: (values[i], i))
    others = [values[i] - values[best] for i in candidates if i != best]
    return best, min((float(gap) for gap in others if gap > 0), default=np.inf)


def fps_with_gap(queries: Array, m: int) -> tuple[list[int], float]:
    """`fps`, and the smallest difference of cosines that decided a choice (inf when none)."""
    if len(queries) <= m:
        return list(range(len(queries))), np.inf
    if m == 0:
        return [], np.inf
    units = unit(queries)
    # The cosine to the sum is proportional to the mean of the cosines: the order is the same.
    mean_cosine = (units * units.sum(axis=0)).sum(axis=-1) / len(units)
    first, gap = _closest(range(len(units)), mean_cosine)
    chosen = [first]
    while len(chosen) < m:
        highest = np.max([(units * units[c]).sum(axis=-1) for c in chosen], axis=0)
        rest = [i for i in range(len(units)) if i not in chosen]
        following, clear = _closest(rest, highest)
        chosen.append(following)
        gap = min(gap, clear)
    return chosen, gap


def fps(queries: Array, m: int) -> list[int]:
    """Farthest-point sampling: indices of m of queries [N, D], in order of choice.

    First the query of the lowest mean cosine to all, then the one whose highest cosine to the
    chosen is lowest. Ties: the smaller index. With N <= m: all, in their order.
    """
    return fps_with_gap(queries, m)[0]


def beacon_scores(
    keys: Array, positions: Array, queries: Array, sees: Array, pool: str = "max"
) -> Array:
    """Max (or mean) attention over the group's heads and the observing queries -> [L].

    keys [L, D], positions [L]; queries [G, N, D] already rotated; query n sees the keys at
    positions <= sees[n] ([N]). In a mean, a key that a query does not see counts as 0.
    """
    rows = [
        attention_row(query, keys, positions <= until)
        for head in queries
        for query, until in zip(head, sees, strict=True)
    ]
    return np.max(rows, axis=0) if pool == "max" else np.mean(rows, axis=0)


@dataclass
class QueryBuffer:
    """The query buffer of one query head: positions of its beacons and of its late queries.

    `late_from` is the cache length above which a query is late (total - n_recent).
    """

    n_beacon: int
    n_recent: int
    late_from: int
    select: Select
    beacons: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    is_late: bool = False

    def observe(self, first: int, n: int, length: int) -> None:
        """Take in n queries from position `first`, the cache holding `length` before them."""
        n_early = min(n, max(0, self.late_from - length))
        early = list(range(first, first + n_early))
        late = list(range(first + n_early, first + n))
        self.beacons += early
        if n > 1 or len(self.beacons) >= self.n_beacon + self.n_recent:
            self._shrink()
        if length + n >= self.late_from and not self.is_late:
            self._shrink()
            self.is_late = True
        self._append_late(late)

    def evicted(self, length: int) -> None:
        """Merge late queries into the beacons after an eviction that left `length` slots."""
        self.beacons += self.late
        self.late = []
        self._shrink()
        self.is_late = length >= self.late_from

    def _append_late(self, late: list[int]) -> None:
        self.late += late
        n_old = max(0, len(self.late) - self.n_recent)
        if n_old:
            self.beacons += self.late[:n_old]
            self.late = self.late[n_old:]
            self._shrink()

    def _shrink(self) -> None:
        if len(self.beacons) > self.n_beacon:
            self.beacons = self.select(self.beacons, self.n_beacon)


@dataclass(frozen=True)
class Beacon(Policy):
    """beacon(n_beacon, n_recent, pool = max | mean, selector = continual | initial, space).

    `initial`: the beacons are the first n_beacon queries of the sequence, for ever.
    `space = "post_rope"`: queries are kept, selected and used as they were rotated at their own
    positions (and see every cached key); with `rerotate` they are only selected so, and observe
    rotated to the current position as in pre_rope.
    """

    n_beacon: int = 16
    n_recent: int = 16
    pool: str = "max"
    selector: str = "continual"
    space: str = "pre_rope"
    rerotate: bool = False

    def wish(self, total: int) -> int:
        """Down to seven eighths of the budget."""
        return total - 7 * total // 8

    def protected_newest(self) -> int:
        return self.n_recent

    def start(self, stream: Stream, budget: Budget) -> BeaconState:
        return BeaconState(self, stream, budget)


class BeaconState(State):
    """A `QueryBuffer` per query head; `buffers[h][g]`."""

    def __init__(self, policy: Beacon, stream: Stream, budget: Budget):
        super().__init__(stream)
        self.policy = policy
        late_from = budget.total - policy.n_recent
        self.buffers = [
            [
                QueryBuffer(policy.n_beacon, policy.n_recent, late_from, self._selector(h, g))
                for g in range(stream.group)
            ]
            for h in range(stream.heads)
        ]

    def _selector(self, h: int, g: int) -> Select:
        vectors = (self.stream.qpre if self.policy.space == "pre_rope" else self.stream.q)[h, g]

        def initial(held: list[int], m: int) -> list[int]:
            return sorted(held)[:m]

        def farthest(held: list[int], m: int) -> list[int]:
            chosen, gap = fps_with_gap(vectors[held], m)
            self.gap = min(self.gap, gap)
            return [held[i] for i in chosen]

        return initial if self.policy.selector == "initial" else farthest

    def observe(self, event: Observation) -> None:
        for buffers in self.buffers:
            for buffer in buffers:
                buffer.observe(event.first, event.n, event.length_before)

    def _observing(self, h: int, g: int, position: int) -> tuple[Array, Array]:
        """(queries [N, D] as they observe at `position`, up to where each sees [N])."""
        stream, buffer = self.stream, self.buffers[h][g]
        if self.policy.space == "pre_rope" or self.policy.rerotate:
            beacons = [stream.rope(stream.qpre[h, g, b], position) for b in buffer.beacons]
        else:
            beacons = [stream.q[h, g, b] for b in buffer.beacons]
        recents = [stream.q[h, g, late] for late in buffer.late]
        return np.array(beacons + recents), np.array([position] * len(beacons) + buffer.late)

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        scores = []
        for h, kept in enumerate(cached):
            observing = [self._observing(h, g, position) for g in range(self.stream.group)]
            queries = np.array([queries for queries, _ in observing])
            # Beacons come from anywhere, but all heads hold as many and the same late ones.
            keys = self.stream.k[h, kept]
            scores.append(beacon_scores(keys, kept, queries, observing[0][1], self.policy.pool))
        return scores

    def evicted(self, kept: list[Array], position: int) -> None:
        for h, buffers in enumerate(self.buffers):
            for buffer in buffers:
                buffer.evicted(len(kept[h]))
