"""What beacon remembers of past queries: four ways, all bounded but `WholeHistory`.

A memory holds the *positions* of its queries; the vectors are read from the whole sequence, which
an implementation does not have. That makes a memory easy to check by hand. `beacons` look from
wherever the row is, `late` queries from their own positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.reference.attention import Array, products

Select = Callable[[list[int], int], list[int]]


class Memory:
    """The memory of one query head, or of heads that choose together."""

    beacons: list[int]
    late: list[int]

    def observe(self, first: int, n: int, length: int) -> None:
        """Take in n queries from position `first`, the cache holding `length` before them."""
        raise NotImplementedError

    def score(self) -> None:
        """Scores are about to be asked for."""

    def evicted(self, length: int) -> None:
        """An eviction left `length` slots."""


@dataclass
class QueryBuffer(Memory):
    """The paper's continual sampling: `refresh="beat"`.

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
        """Merges late queries into the beacons: those that leave the newest by the next time."""
        room = self.late_from + self.n_recent - length
        leave = max(0, min(len(self.late), len(self.late) + room - self.n_recent))
        self.beacons += self.late[:leave]
        self.late = self.late[leave:]
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


@dataclass
class WholeHistory(Memory):
    """Every query of the sequence; beacons are chosen anew from the older ones at each eviction."""

    n_beacon: int
    n_recent: int
    select: Select
    older: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    beacons: list[int] = field(default_factory=list)

    def observe(self, first: int, n: int, length: int) -> None:
        older = max(0, first + n - self.n_recent)
        self.older = list(range(older))
        self.late = list(range(older, first + n))

    def score(self) -> None:
        self.beacons = self.select(self.older, self.n_beacon)


@dataclass
class RevisitBuffer(Memory):
    """`refresh="revisit"`: a query that leaves the newest may take a redundant beacon's place.

    It does where its highest cosine to the beacons is below that of their closest pair: then no
    beacon stands for it, and the pair's later one can go. `points` [T, D] are unit vectors; `gap`
    is how clear the decisions were.
    """

    n_beacon: int
    n_recent: int
    points: Array
    beacons: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    gap: float = np.inf

    def observe(self, first: int, n: int, length: int) -> None:
        for position in range(first, first + n):
            self.late.append(position)
            if len(self.late) > self.n_recent:
                self._offer(self.late.pop(0))

    def _offer(self, candidate: int) -> None:
        if len(self.beacons) < self.n_beacon:
            self.beacons.append(candidate)
        elif self.n_beacon > 1:
            held = self.points[self.beacons]
            alike = products(self.points[candidate], held).max()
            first, second = np.triu_indices(len(held), 1)  # By first, then by second place.
            cosines = products(held, held)[first, second]
            pair = int(np.argmax(cosines))
            self._clear(abs(cosines[pair] - alike))
            if alike < cosines[pair]:
                other = second != second[pair]
                self._clear(cosines[pair] - cosines[other].max(initial=-np.inf))
                self.beacons[second[pair]] = candidate

    def _clear(self, gap: float) -> None:
        if gap > 0:
            self.gap = min(self.gap, float(gap))
