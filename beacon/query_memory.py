"""What the score asks of a memory of queries, and what all such memories have in common.

Which queries of the past a row still has is a memory's business: `QueryBuffer` thins them out again
and again, `Exchange` replaces one at a time, `History` keeps all. The policy only asks who looks.

Queries are stored as the model made them, post-RoPE, with their positions. What they were before
RoPE is recovered where it is needed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicies.beacon.space import Space
from kvpolicies.policy import Geometry, Observation, View


class ObservationQueries(NamedTuple):
    """The observation queries of some rows, at the positions they look from."""

    queries: Tensor
    """[B, H, G, N, D] post-RoPE."""
    positions: Tensor
    """[B, N]; a query does not see keys at later positions."""
    valid: Tensor
    """[B, N] bool: false where there is no query."""


@dataclass(frozen=True)
class QueryMemory:
    """Remembers queries: some of the past as beacons, the newest as recents.

    Its tensors are `queries` [B, H, G, N, D] and `when` [B, H, G, N] int32, which holds position
    + 1 so that zero means "no query".
    """

    n_beacon: int
    """Past queries kept, a query head."""
    n_recent: int
    """Newest queries kept."""
    selector: str
    """How beacons are chosen: an option of the policy `beacon`."""
    space: Space
    """Where queries are compared."""

    @property
    def size(self) -> int:
        """N, entries a query head."""
        return self.n_beacon + self.n_recent

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """No queries, for all rows."""
        return self._empty(geometry, self.size)

    def add(self, view: View, step: Observation) -> None:
        """Takes in a step's n queries of every row."""
        raise NotImplementedError

    def looking(self, view: View) -> ObservationQueries:
        """Beacons, looking from the newest position, and recents, from their own."""
        raise NotImplementedError

    def after_eviction(self, view: View) -> None:
        """Something to do once tokens are gone? Default: nothing."""

    @staticmethod
    def _empty(geometry: Geometry, entries: int) -> dict[str, Tensor]:
        g = geometry
        shape = (g.rows, g.heads, g.groups, entries)
        return {
            "queries": torch.zeros(*shape, g.head_dim, dtype=g.dtype, device=g.device),
            "when": torch.zeros(shape, dtype=torch.int32, device=g.device),
        }

    def _observers(
        self, view: View, beacons: Tensor, held: Tensor, recents: Tensor, own: Tensor
    ) -> ObservationQueries:
        """Beacons in the space's coordinates, `held` [B, n_beacon] of them true, and recents.

        `own` [B, n_recent] are the recents' positions, negative where there is none.
        """
        newest = view.newest[:, None].expand(-1, self.n_beacon)
        moved = self.space.looking_from(view.rope, beacons, newest)
        return ObservationQueries(
            torch.cat([moved, recents.float()], dim=3),
            torch.cat([newest, own], dim=1),
            torch.cat([held, own >= 0], dim=1),
        )
