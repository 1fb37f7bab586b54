"""Beacons that are exchanged one by one, whenever a query comes that none of them stands for.

The buffer of continual farthest-point sampling is thinned periodically, however little is new.
Here a query that leaves the ring of the newest is measured at once: if even its closest beacon is
farther from it than the two closest beacons are from one another, it revisits a direction without a
beacon, and takes the later one's place.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvpolicies.beacon.query_memory import ObservationQueries, QueryMemory
from kvpolicies.beacon.space import taken
from kvpolicies.policy import Observation, View

# Candidates of a prompt that are measured against each other at once.
PIECE = 128


@dataclass(frozen=True)
class Exchange(QueryMemory):
    """Entries [0, n_beacon) are the beacons, the rest is a ring: position p at p % n_recent.

    The first `n_beacon` queries to leave the ring become beacons as they come. How many there are
    follows from the tokens seen, so nothing is counted.
    """

    def add(self, view: View, step: Observation) -> None:
        """In pieces: those who leave the ring are candidates, then the new queries enter it."""
        n = step.positions.shape[1]
        for first in range(0, n, PIECE):
            piece = slice(first, min(n, first + PIECE))
            queries, positions = step.queries[:, :, :, piece], step.positions[:, piece]
            longest = max(view.seen) - n + piece.stop
            if self.n_beacon and longest > self.n_recent:
                self._retire(view, queries, positions, full=longest > self.size)
            self._enter(view, queries[:, :, :, -self.n_recent :], positions[:, -self.n_recent :])

    def looking(self, view: View) -> ObservationQueries:
        """All that is held."""
        queries, when = view.state["queries"], view.state["when"]
        m = self.n_beacon
        beacons = self.space.raw(view.rope, queries[:, :, :, :m], when[:, :, :, :m])
        first = when[:, 0, 0]  # which entries are filled, and the ring's positions: as all heads
        return self._observers(
            view, beacons, first[:, :m] > 0, queries[:, :, :, m:], first[:, m:].long() - 1
        )

    def _enter(self, view: View, queries: Tensor, positions: Tensor) -> None:
        """Writes queries [B, H, G, n, D] at positions [B, n] into the ring, n <= n_recent."""
        row = torch.arange(len(positions), device=positions.device)[:, None]
        place = self.n_beacon + positions % self.n_recent
        fresh = queries.permute(0, 3, 1, 2, 4).to(view.state["queries"].dtype)
        view.state["queries"][row, :, :, place] = fresh
        view.state["when"][row, :, :, place] = (positions + 1).to(torch.int32)[..., None, None]

    def _retire(self, view: View, queries: Tensor, positions: Tensor, full: bool) -> None:
        """Whom the new queries push out of the ring, or past it, may become a beacon.

        Args:
            full: whether any row comes to hold all its beacons, so that exchanges are possible.
        """
        m, held = self.n_beacon, view.state
        # The position of who leaves is also its number among all who left; negative: nobody does.
        number, start = positions - self.n_recent, positions[:, :1]
        place = torch.where(number < start, number % self.n_recent, number - start + self.n_recent)
        beacons = torch.arange(m, device=place.device).expand(len(place), -1)
        index = torch.cat([beacons, m + place], dim=1)[:, None, None]
        index = index.expand(-1, queries.shape[1], -1, -1)  # [B, H, 1, m + n]
        fresh = (positions + 1)[:, None, None].expand(queries.shape[:-1]).to(torch.int32)
        when = taken(torch.cat([held["when"], fresh], dim=3), index)
        queries = queries.to(held["queries"].dtype)
        queries = taken(torch.cat([held["queries"], queries], dim=3), index)
        points = self.space.points(self.space.raw(view.rope, queries, when))
        chosen = exchanged(points, number, m, full)
        held["queries"][:, :, :, :m] = taken(queries, chosen)
        held["when"][:, :, :, :m] = taken(when, chosen)


def exchanged(points: Tensor, number: Tensor, m: int, full: bool) -> Tensor:
    """Who holds the `m` places once all candidates have been measured, one after the other.

    Args:
        points: [B, H, G or 1, m + n, D] of the beacons, then of n candidates; by cosine.
        number: [B, n] of each candidate among all that a row ever had: up to m they fill the
            places in order; negative: there is none.
        full: false when no row has a candidate beyond the first m.

    Returns:
        [B, H, G or 1, m] int64, indices into the points.
    """
    places = torch.arange(m, device=points.device)
    holders = places.expand(*points.shape[:3], m)
    if full:
        unit = normalize(points, dim=-1, eps=1e-12)
        cosines = unit @ unit.mT
    for i in range(number.shape[1]):
        its = number[:, i, None, None, None]
        takes = places == its
        if full:
            takes = takes | ((its >= m) & _revisited(cosines, holders, m + i))
        holders = torch.where(takes, m + i, holders)
    return holders


def _revisited(cosines: Tensor, holders: Tensor, candidate: int) -> Tensor:
    """[B, H, G or 1, m] bool: the place that a candidate takes if no place is free, or none."""
    m = holders.shape[-1]
    wide = holders[..., None].expand(*holders.shape, cosines.shape[-1])
    rows = cosines.gather(-2, wide)  # [B, H, G or 1, m, m + n]
    pairs = rows.gather(-1, holders[..., None, :].expand(*holders.shape, m))
    pairs = pairs.masked_fill(_not_earlier(m, pairs.device), float("-inf")).flatten(-2)
    closest = pairs.argmax(dim=-1, keepdim=True)  # the first of equals: smallest i, then j
    revisits = rows[..., candidate].amax(dim=-1, keepdim=True) < pairs.gather(-1, closest)
    return revisits & (torch.arange(m, device=closest.device) == closest % m)


@lru_cache(maxsize=8)
def _not_earlier(m: int, device: torch.device) -> Tensor:
    # The complement of i < j: every pair once, and nobody with itself. Never written to.
    return torch.ones(m, m, dtype=torch.bool, device=device).tril()
