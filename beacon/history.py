"""The whole history of queries, and beacons chosen from it anew at each eviction.

The ablations that show what the bounded buffer gives up. They keep every query of the sequence, as
many bytes a token as G keys: no bounded state, and `state_bytes` says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicies.beacon.query_memory import ObservationQueries, QueryMemory
from kvpolicies.beacon.space import Space, taken
from kvpolicies.errors import UserError
from kvpolicies.kernels.fps import farthest_points
from kvpolicies.kernels.kmeans import cluster_means, spherical_kmeans
from kvpolicies.policy import Geometry, Observation, View


@dataclass(frozen=True)
class History(QueryMemory):
    """Every query of the sequence, position p at entry p; N is the longest sequence's length.

    Recents are the `n_recent` newest; beacons are the selector's choice of all older ones.
    """

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """Room for the longest sequence.

        Raises:
            UserError: when its length is not known.
        """
        if geometry.length < 1:
            raise UserError(
                f"beacon: selector={self.selector!r} keeps every query, so the longest sequence "
                "must be known: give FixedBudgetCache max_length="
            )
        return self._empty(geometry, geometry.length)

    def add(self, view: View, step: Observation) -> None:
        """Writes n queries of every row to their entries.

        Raises:
            UserError: when a sequence is longer than it was said to become.
        """
        queries, when = view.state["queries"], view.state["when"]
        if max(view.seen) > queries.shape[3]:
            raise UserError(
                f"beacon: selector={self.selector!r} keeps every query, and has room for "
                f"{queries.shape[3]} (max_length), but the sequence is longer"
            )
        row = torch.arange(len(view.seen), device=queries.device)[:, None]
        fresh = step.queries.permute(0, 3, 1, 2, 4)  # [B, n, H, G, D]
        queries[row, :, :, step.positions] = fresh.to(queries.dtype)
        when[row, :, :, step.positions] = (step.positions + 1).to(when.dtype)[..., None, None]

    def looking(self, view: View) -> ObservationQueries:
        """Chooses beacons row by row: rows differ in length, and a row's choice is its own."""
        beacons = torch.cat([self._beacons(view, row) for row in range(len(view.seen))])
        older = (view.newest + 1 - self.n_recent)[:, None]  # [B, 1], negative: not even recents
        held = torch.arange(self.n_beacon, device=older.device) < older
        own = older + torch.arange(self.n_recent, device=older.device)
        index = own.clamp_min(0)[:, None, None]  # [B, 1, 1, n_recent]
        heads = view.state["queries"].shape[1]
        recents = taken(view.state["queries"], index.expand(-1, heads, -1, -1))
        return self._observers(view, beacons, held, recents, own)

    def _beacons(self, view: View, row: int) -> Tensor:
        """[1, H, G, n_beacon, D] in the space's coordinates; zeros where there are fewer."""
        older = max(0, view.seen[row] - self.n_recent)
        past = (view.state[k][row : row + 1, :, :, :older] for k in ("queries", "when"))
        raw = self.space.raw(view.rope, *past)
        if older > self.n_beacon > 0:
            return SELECTORS[self.selector](self.space, raw, self.n_beacon)
        return pad(raw, (0, 0, 0, self.n_beacon - older))  # cuts where it is negative


def farthest(space: Space, raw: Tensor, m: int) -> Tensor:
    """`m` of `raw` [1, H, G, N, D] by farthest-point sampling."""
    return taken(raw, farthest_points(space.points(raw), m))


def nearest(space: Space, raw: Tensor, m: int) -> Tensor:
    """The queries nearest to the centres of `m` clusters; two centres may share one."""
    return taken(raw, spherical_kmeans(space.points(raw), m).nearest)


def centroids(space: Space, raw: Tensor, m: int) -> Tensor:
    """The means of `m` clusters' queries, not normalised: queries that nobody ever asked."""
    return cluster_means(raw, spherical_kmeans(space.points(raw), m))


SELECTORS: dict[str, Callable[[Space, Tensor, int], Tensor]] = {
    "naive_fps": farthest,
    "kmeans_nearest": nearest,
    "kmeans_centroid": centroids,
}
