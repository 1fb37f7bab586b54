"""Beacons that are exchanged one by one, whenever a query comes that none of them stands for.

The buffer of continual farthest-point sampling is thinned at its own beat, however little is new.
Here a query that leaves the ring of the newest is measured at once: if even its closest beacon is
farther from it than the two closest beacons are from one another, it revisits a direction without a
beacon, and takes the later one's place.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvpolicies.beacon.keeper import Keeper, Observers
from kvpolicies.policy import Step, View


@dataclass(frozen=True)
class Exchange(Keeper):
    """Entries [0, n_beacon) are the beacons, the rest is a ring: position p at p % n_recent.

    The first `n_beacon` queries to leave the ring become beacons as they come. How many there are
    follows from the tokens seen, so nothing is counted.
    """

    def add(self, view: View, step: Step) -> None:
        """One query after the other, for each is measured against what the last one left."""
        n = step.positions.shape[1]
        for i in range(n):
            newest = max(view.seen) - n + i
            if newest >= self.n_recent and self.n_beacon:
                self._retire(view, step.positions[:, i], full=newest >= self.size)
            self._enter(view, step.queries[:, :, :, i], step.positions[:, i])

    def looking(self, view: View) -> Observers:
        """All that is held."""
        queries, when = view.state["queries"], view.state["when"]
        m = self.n_beacon
        beacons = self.space.raw(view.rope, queries[:, :, :, :m], when[:, :, :, :m])
        first = when[:, 0, 0]  # which entries are filled, and the ring's positions: as all heads
        return self._observers(
            view, beacons, first[:, :m] > 0, queries[:, :, :, m:], first[:, m:].long() - 1
        )

    def _enter(self, view: View, queries: Tensor, positions: Tensor) -> None:
        """Writes queries [B, H, G, D] at positions [B] into the ring."""
        row = torch.arange(len(positions), device=positions.device)
        place = self.n_beacon + positions % self.n_recent
        view.state["queries"][row, :, :, place] = queries.to(view.state["queries"].dtype)
        view.state["when"][row, :, :, place] = (positions + 1).to(torch.int32)[:, None, None]

    def _retire(self, view: View, positions: Tensor, full: bool) -> None:
        """What the queries at `positions` [B] will push out of the ring may become a beacon.

        Args:
            full: whether any row has all its beacons, so that exchanges are possible.
        """
        queries, when = view.state["queries"], view.state["when"]
        row = torch.arange(len(positions), device=positions.device)
        place = self.n_beacon + positions % self.n_recent
        leaving, its_when = queries[row, :, :, place], when[row, :, :, place]  # [B, H, G(, D)]
        number = (positions - self.n_recent)[:, None, None]  # negative: nothing leaves yet
        target, wins = number.clamp(0, self.n_beacon - 1), number >= 0  # [B, 1, 1]
        if full:
            later, revisits = self._revisited(view, leaving, its_when)
            fills = number < self.n_beacon
            target = torch.where(fills, target, later)
            wins = torch.where(fills, wins, revisits)
        heads, groups = (torch.arange(n, device=row.device) for n in its_when.shape[1:])
        entry = (row[:, None, None], heads[:, None], groups, target)
        queries[entry] = torch.where(wins[..., None], leaving, queries[entry])
        when[entry] = torch.where(wins, its_when, when[entry])

    def _revisited(self, view: View, leaving: Tensor, its_when: Tensor) -> tuple[Tensor, Tensor]:
        """(the later of the two closest beacons, whether to exchange it), each [B, H, G or 1]."""
        m = self.n_beacon
        queries = torch.cat([view.state["queries"][:, :, :, :m], leaving[..., None, :]], dim=3)
        when = torch.cat([view.state["when"][:, :, :, :m], its_when[..., None]], dim=3)
        points = self.space.points(self.space.raw(view.rope, queries, when))
        unit = normalize(points, dim=-1, eps=1e-12)
        cosines = unit @ unit.mT  # [B, H, G or 1, m + 1, m + 1]
        earlier = torch.ones(m, m, dtype=torch.bool, device=unit.device).triu(1)  # i < j
        pairs = cosines[..., :m, :m].masked_fill(~earlier, float("-inf")).flatten(-2)
        closest = pairs.argmax(dim=-1, keepdim=True)  # the first of equals: smallest i, then j
        its_own = cosines[..., m, :m].amax(dim=-1)
        return closest[..., 0] % m, its_own < pairs.gather(-1, closest)[..., 0]
