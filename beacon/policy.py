"""beacon: BeaconKV's training-free policy, and the ablations of its parts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.beacon.buffer import QueryBuffer, counters
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.observe import observation_weights
from kvpolicies.policy import Geometry, Policy, Scores, Step, View, whole

CHOICES = {
    "pool": ("max", "mean"),
    "selector": ("continual", "initial"),
    "space": ("pre_rope", "post_rope"),
}


@dataclass(frozen=True, kw_only=True)
class Beacon(Policy):
    """A few far-apart past queries, and the newest ones, predict which tokens are revisited.

    Beacons are kept per query head by farthest-point sampling on queries before RoPE, and look at
    the cache from the current position; the `n_recent` newest queries look from their own. Evicts
    down to 7/8 of the budget.

    Options (each an ablation of the paper): `pool` over queries and group; the split `n_beacon` +
    `n_recent`; `selector="initial"` keeps the first queries instead (Initial+Recent); `space` in
    which FPS measures, `"post_rope"` also leaves beacons at their own positions.
    """

    name = "beacon"
    source = "BeaconKV"
    n_beacon: int = 16
    n_recent: int = 16
    pool: str = "max"
    selector: str = "continual"
    space: str = "pre_rope"

    def __post_init__(self) -> None:
        whole(self.n_beacon, 0, "beacon: n_beacon")
        whole(self.n_recent, 1, "beacon: n_recent")
        for option, allowed in CHOICES.items():
            if getattr(self, option) not in allowed:
                raise UserError(
                    f"beacon: {option} must be one of {', '.join(allowed)}, "
                    f"got {getattr(self, option)!r}"
                )

    @property
    def needs_rope(self) -> bool:  # type: ignore[override]
        """Only post-RoPE beacons stay where they were."""
        return self.space == "pre_rope"

    @property
    def buffer(self) -> QueryBuffer:
        """The buffer's rules."""
        return QueryBuffer(self.n_beacon, self.n_recent, self.selector, self.space)

    def drop(self, budget: Budget) -> int:
        """Down to 7/8 of the budget."""
        return max(1, min(budget.total - 7 * budget.total // 8, budget.topk))

    def protects(self, budget: Budget) -> int:
        """The recents."""
        return self.n_recent

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """See `QueryBuffer`."""
        return self.buffer.init_state(geometry)

    def observe(self, view: View, step: Step) -> None:
        """Feeds the buffer."""
        self.buffer.add(view, step)

    def scores(self, view: View) -> Scores:
        """max (or mean), over group and observation queries, of their attention to each key."""
        marks = counters(view)
        place = torch.arange(self.buffer.size, device=view.keys.device)
        count, beacons = (
            torch.tensor([c[k] for c in marks], device=place.device)[:, None]
            for k in ("count", "beacons")
        )
        is_beacon, valid = place < beacons, place < count  # [B, N]
        own = view.state["when"][:, 0, 0] - 1  # recents came together: one position for all heads
        positions = torch.where(is_beacon, view.newest[:, None], own)
        weights = observation_weights(
            self._looking(view, is_beacon, positions),
            view.keys,
            positions,
            view.positions,
            view.scale,
            valid,
        )
        if self.pool == "mean":
            # Without beacons the buffer may be empty: nobody looks, and all score zero.
            looking = (count * weights.shape[2]).clamp_min(1)
            return weights.sum(dim=(2, 3)) / looking[:, :, None]
        return weights.amax(dim=(2, 3))

    def evicted(self, view: View) -> None:
        """The buffer starts over from beacons and recents."""
        self.buffer.after_eviction(view)

    def _looking(self, view: View, is_beacon: Tensor, positions: Tensor) -> Tensor:
        """Observation queries [B, H, G, N, D] at the positions they look from."""
        queries = view.state["queries"]
        if self.space == "post_rope":
            return queries
        raw = view.rope.unrotate(queries, (view.state["when"] - 1).clamp_min(0))
        moved = view.rope.rotate(raw, positions.clamp_min(0))
        return torch.where(is_beacon[:, None, None, :, None], moved, queries.float())
