"""beacon: BeaconKV's training-free policy, and the ablations of its parts."""

from dataclasses import dataclass

from torch import Tensor

from kvpolicies.beacon.buffer import QueryBuffer
from kvpolicies.beacon.exchange import Exchange
from kvpolicies.beacon.history import SELECTORS, History
from kvpolicies.beacon.pooling import soft
from kvpolicies.beacon.query_memory import QueryMemory
from kvpolicies.beacon.space import Space
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.observe import observation_scores
from kvpolicies.kernels.weights import observation_weights
from kvpolicies.options import option
from kvpolicies.policy import (
    MOST_QUERIES,
    Geometry,
    Observation,
    Policy,
    Schedule,
    Scores,
    View,
)

# What keeps the queries: by `refresh`, then by `selector`.
MEMORIES: dict[str, dict[str, type[QueryMemory]]] = {
    "periodic": {
        "continual": QueryBuffer,
        "initial": QueryBuffer,
        **dict.fromkeys(SELECTORS, History),
    },
    "revisit": {"continual": Exchange},
}


@dataclass(frozen=True, kw_only=True)
class Beacon(Policy):
    """A few far-apart past queries, and the newest ones, predict which tokens are revisited.

    Beacons are kept per query head by farthest-point sampling on queries before RoPE, and look at
    the cache from the current position; the `n_recent` newest queries look from their own. Evicts
    down to 7/8 of the budget.

    `faithful=True` is the paper's rule: the prompt stays whatever its scores, an eighth of the
    other slots goes, and of the newest tokens the recents alone are protected. The other options
    are the paper's ablations and ours.

    Raises:
        UserError: for a value that an option cannot have, or options that exclude each other.
    """

    name = "beacon"
    whole_prompts = True  # farthest-point sampling chooses among all queries it is shown at once
    source = "BeaconKV, arXiv 2609.04971"
    layers_alike = True
    n_beacon: int = option(16, least=0, most=MOST_QUERIES)
    """Past queries that look, far apart from each other; 0 = none."""
    n_recent: int = option(16, least=1, most=MOST_QUERIES)
    """Newest queries that look, at least 1; their own tokens are protected."""
    pool: str = option("max", choices=("max", "mean", "soft"))
    """Over observation queries and the group's heads: `max`, `mean`, or `soft`, between the two."""
    temperature: float = option(0.25, above=0)
    """Of `soft`, the log-mean-exp of the log-weights: 1 is the mean, towards 0 the maximum."""
    selector: str = option("continual", choices=tuple(MEMORIES["periodic"]))
    """How beacons are chosen.

    `continual`: a bounded buffer is thinned again and again. `initial`: the first queries instead
    (Initial+Recent). Three choose from all queries but the recents, anew at each eviction:
    `naive_fps`, and by spherical k-means `kmeans_centroid` and `kmeans_nearest`. These keep the
    whole history, as many bytes a token as G keys: no bounded state, for comparisons only;
    `state_bytes` counts it in full.
    """
    space: str = option("pre_rope", choices=("pre_rope", "post_rope"))
    """Where queries are compared; `post_rope` also leaves beacons at their own positions."""
    shared: bool = False
    """One set of beacons a KV group: the same time steps for all its query heads."""
    refresh: str = option("periodic", choices=("periodic", "revisit"))
    """`periodic`, the paper's, thins the buffer whenever it is full; `revisit` exchanges one beacon
    whenever a query comes that none of them stands for (see `Exchange`)."""
    faithful: bool = False
    """The paper's rule: the prompt stays, and no window beyond the recents."""

    def __post_init__(self) -> None:
        if self.refresh == "beat":  # what older files call it
            object.__setattr__(self, "refresh", "periodic")
        super().__post_init__()
        if self.pool != "soft" and self.temperature != Beacon.temperature:
            raise UserError(
                f"beacon: temperature={self.temperature!r} needs pool='soft', got "
                f"pool={self.pool!r}"
            )
        if self.selector not in MEMORIES[self.refresh]:
            raise UserError(
                f"beacon: refresh={self.refresh!r} needs selector='continual', got "
                f"selector={self.selector!r}"
            )

    @property
    def needs_rope(self) -> bool:  # type: ignore[override]
        """Only post-RoPE beacons stay where they were."""
        return self.space == "pre_rope"

    @property
    def memory(self) -> QueryMemory:
        """The memory that keeps its queries."""
        kind = MEMORIES[self.refresh][self.selector]
        return kind(self.n_beacon, self.n_recent, self.selector, Space(self.space, self.shared))

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Down to 7/8 of the budget, of what the prompt leaves of it under `faithful=True`; the
        recents are protected.

        Raises:
            UserError: under `faithful=True`, if the prompt leaves nothing to choose.
        """
        rest = budget.total
        if self.faithful:
            budget = Budget(budget.total, 0, self.n_recent, keeps_prompt=True).for_prompt(prompt)
            rest -= prompt
        drop = max(1, min(rest - 7 * rest // 8, budget.topk))
        return Schedule.under(budget, drop, self.n_recent)

    @property
    def own_rule(self) -> bool:
        """The paper's, which keeps the prompt."""
        return self.faithful

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """No queries yet."""
        return self.memory.init_state(geometry)

    def observe(self, view: View, step: Observation) -> None:
        """Feeds the memory."""
        self.memory.add(view, step)

    def scores(self, view: View) -> Scores:
        """The pool, over group and observation queries, of their attention to each key."""
        queries, positions, valid = self.memory.looking(view)
        args = (queries, view.keys, positions, view.positions, view.softmax, valid)
        if self.pool != "soft":
            return observation_scores(*args, pool=self.pool)
        weights = observation_weights(*args)
        # Without beacons nobody may be looking, and all score zero.
        looking = (valid.sum(dim=1) * weights.shape[2]).clamp_min(1)
        return soft(weights, looking[:, None, None], self.temperature)

    def evicted(self, view: View) -> None:
        """Tells the memory."""
        self.memory.after_eviction(view)
