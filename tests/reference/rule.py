"""The one eviction rule for one layer and one row, as a slow simulation.

`simulate` feeds a whole recorded sequence through a policy under a budget and says when each
token of each KV head is evicted. Convention: attend, then evict. Eviction is lazy: it happens
just before a token needs a slot, with everything observed up to position p, and an evicted
token's time is e = p + 1, the position of the first query that no longer sees it.

Cached positions are kept sorted, so that slot order is position order here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.reference.attention import Array, Rope

NEVER = 2**31 - 1


@dataclass(frozen=True)
class Budget:
    """total slots of a head; of these `sinks` oldest and `window` newest are protected."""

    total: int
    sinks: int = 4
    window: int = 32

    @property
    def topk(self) -> int:
        return self.total - self.sinks - self.window


@dataclass(frozen=True)
class Stream:
    """One row and layer: k [H, T, D] and q [H, G, T, D] rotated, qpre [H, G, T, D] not.

    The first `prompt` tokens come in one call, each of the others in its own. Values, unless they
    are given, are the keys of the tokens in reverse order.
    """

    k: Array
    q: Array
    qpre: Array
    rope: Rope
    prompt: int
    values: Array | None = None

    @property
    def v(self) -> Array:
        """[H, T, D]"""
        return self.k[:, ::-1] if self.values is None else self.values

    @property
    def output(self) -> Array:
        """The layer's output projection [H, G, D, E], the same for all streams of these sizes."""
        shape = (self.heads, self.group, self.k.shape[-1], 12)
        return np.random.default_rng(7).standard_normal(shape).astype(np.float32).astype(float)

    @property
    def heads(self) -> int:
        return self.q.shape[0]

    @property
    def group(self) -> int:
        return self.q.shape[1]

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    def calls(self) -> list[int]:
        """The number of tokens of each forward call."""
        return [self.prompt] * (self.prompt > 0) + [1] * (self.tokens - self.prompt)

    def newest(self, position: int, n: int) -> Array:
        """Positions of the last n queries (fewer if fewer exist) up to `position`."""
        return np.arange(max(0, position - n + 1), position + 1)


@dataclass(frozen=True)
class Terms:
    """What a policy makes of the budget asked for, in one sequence.

    `budget` is in force; a row that has processed `seen` tokens must make room before the next
    once it holds `full_at(seen)` slots (default: the total); `drop` is what then goes, exactly
    (default: as the rule says).
    """

    budget: Budget
    full_at: Callable[[int], int] | None = None
    drop: int | None = None

    def room(self, held: int, seen: int) -> int:
        return (self.budget.total if self.full_at is None else self.full_at(seen)) - held


def of_prompt(asked: Budget, prompt: int, limit: int, sinks: int = 0, window: int = 0) -> Terms:
    """The prompt is compressed once, when it is complete; every new token stays."""
    most = max(prompt, asked.total) + limit

    def full_at(seen: int) -> int:
        return asked.total if seen == prompt > asked.total else most

    return Terms(Budget(most, sinks, window), full_at, prompt - asked.total)


@dataclass(frozen=True)
class Observation:
    """n queries, from position `first`, have attended; `cached[h]` [L] holds their own keys too."""

    cached: list[Array]
    first: int
    n: int

    @property
    def length_before(self) -> int:
        """Slots filled before these queries' keys were appended."""
        return len(self.cached[0]) - self.n


class State:
    """What a policy keeps while a sequence runs. Lists have one entry per KV head.

    `gap` is the smallest distance by which any decision inside the state was taken.
    """

    def __init__(self, stream: Stream):
        self.stream = stream
        self.gap = float("inf")

    def observe(self, event: Observation) -> None:
        """Learn from queries that have just attended."""

    def about_to_drop(self, n: int) -> None:
        """Scores are about to be asked for, of which each head's n lowest go."""

    def scores(self, cached: list[Array], position: int) -> list[Array]:
        """Score [L] of the cached positions [L] of each head; `position` is the newest."""
        raise NotImplementedError

    def evicted(self, kept: list[Array], position: int) -> None:
        """Forget what was evicted: kept[h] are the positions that stay."""


class Policy:
    """Policy data of the rule; subclasses are frozen dataclasses of options."""

    def wish(self, total: int) -> int:
        """How many tokens to drop at a time in decoding, before the caps."""
        raise NotImplementedError

    def terms(self, asked: Budget, prompt: int, limit: int) -> Terms:
        """For a prompt of so many tokens and at most `limit` new ones: as asked, by default."""
        return Terms(asked)

    def protected_newest(self, budget: Budget) -> int:
        """Newest tokens that the policy wants protected beyond the budget's window."""
        return 0

    def protection(self, budget: Budget) -> tuple[int, int]:
        """(sinks, window) that are protected."""
        return budget.sinks, budget.window

    def start(self, stream: Stream, budget: Budget) -> State:
        raise NotImplementedError


def decode_drop(policy: Policy, budget: Budget) -> int:
    """Tokens that one eviction drops in decoding."""
    return max(1, min(policy.wish(budget.total), budget.topk))


def eviction_size(policy: Policy, budget: Budget, prompt: bool) -> int:
    """Tokens that an eviction drops when a token needs a slot, of the prompt or a new one."""
    chunk = max(1, budget.topk // 2) if prompt else 1
    return max(decode_drop(policy, budget), chunk)


def protected(policy: Policy, budget: Budget, positions: Array, newest: int, n_drop: int) -> Array:
    """Which of `positions` [L] an eviction of n_drop tokens must leave -> bool [L]."""
    sinks, window = policy.protection(budget)
    window = max(window, min(policy.protected_newest(budget), budget.total - sinks - n_drop))
    return (positions < sinks) | (positions > newest - window)


def lowest(scores: Array, positions: Array, n_drop: int, shield: Array) -> list[int]:
    """Slots of the n_drop lowest by (score, position) among those not shielded."""
    if np.isnan(scores).any():
        raise ValueError("a score is NaN")
    ranked = np.lexsort((positions, scores))
    return [int(slot) for slot in ranked if not shield[slot]][:n_drop]


def margin(scores: Array, n_drop: int, shield: Array) -> float:
    """Lowest kept minus highest dropped score among those not shielded; 0 is an exact tie.

    inf when nothing unshielded is kept.
    """
    return _gap(scores, n_drop, shield)[0]


def relative_margin(scores: Array, n_drop: int, shield: Array) -> float:
    """`margin` relative to the size of what float32 rounds.

    That is the larger of the two scores' magnitudes (at least 1e-30, where float32 underflows);
    among scores of both signs or negative ones, where rounding does not shrink with the score,
    the largest finite magnitude of all.
    """
    gap, magnitude = _gap(scores, n_drop, shield)
    return gap / magnitude if 0 < gap < np.inf and magnitude < np.inf else gap


def _gap(scores: Array, n_drop: int, shield: Array) -> tuple[float, float]:
    ranked = np.sort(scores[~shield])
    if not 0 < n_drop < len(ranked):
        return float("inf"), 1.0
    low, high = float(ranked[n_drop - 1]), float(ranked[n_drop])
    signed = (scores < 0).any()
    magnitude = np.abs(scores[np.isfinite(scores)]).max() if signed else max(low, high)
    return (0.0 if low == high else high - low), max(float(magnitude), 1e-30)


@dataclass(frozen=True)
class Eviction:
    """One eviction at newest position p: per head the positions kept and dropped (sorted).

    `margins[h]` is the relative margin, `edges[h]` the highest score that was dropped, `state_gap`
    the state's `gap` so far.
    """

    position: int
    n_drop: int
    kept: list[Array]
    dropped: list[Array]
    scores: list[Array]
    margins: list[float]
    edges: list[float]
    state_gap: float

    def near_tie(self, rtol: float = 1e-6, atol: float = 1e-6) -> bool:
        """Whether float32 could honestly have chosen otherwise. Exact ties have a rule: no."""
        return any(0 < gap <= rtol for gap in self.margins) or 0 < self.state_gap <= atol


@dataclass
class Outcome:
    """e [H, T] eviction times (int64, NEVER), the evictions in order, the largest slot count."""

    e: Array
    evictions: list[Eviction] = field(default_factory=list)
    max_slots: int = 0
    final: list[Array] = field(default_factory=list)

    @property
    def kept(self) -> list[list[Array]]:
        """kept[i][h]: positions that head h keeps after eviction i."""
        return [eviction.kept for eviction in self.evictions]

    def clear_until(self, rtol: float = 1e-6, atol: float = 1e-6) -> int:
        """How many first evictions are free of near ties: compare only these."""
        for i, eviction in enumerate(self.evictions):
            if eviction.near_tie(rtol, atol):
                return i
        return len(self.evictions)


def _evict(
    policy: Policy, budget: Budget, state: State, cached: list[Array], newest: int, n_drop: int
) -> Eviction:
    state.about_to_drop(n_drop)
    scores = state.scores(cached, newest)
    kept, dropped, margins, edges = [], [], [], []
    for positions, row in zip(cached, scores, strict=True):
        shield = protected(policy, budget, positions, newest, n_drop)
        slots = lowest(row, positions, n_drop, shield)
        kept.append(np.delete(positions, slots))
        dropped.append(np.sort(positions[slots]))
        margins.append(relative_margin(row, n_drop, shield))
        edges.append(float(row[slots[-1]]))
    eviction = Eviction(newest, n_drop, kept, dropped, scores, margins, edges, state.gap)
    state.evicted(kept, newest)
    return eviction


def simulate(
    policy: Policy, stream: Stream, budget: Budget, calls: Sequence[int] | None = None
) -> Outcome:
    """Run the rule over a sequence; `calls` (default: prompt, then one by one) sums to <= T."""
    terms = policy.terms(budget, stream.prompt, stream.tokens - stream.prompt)
    budget = terms.budget
    state = policy.start(stream, budget)
    outcome = Outcome(np.full((stream.heads, stream.tokens), NEVER, dtype=np.int64))
    cached = [np.zeros(0, dtype=np.int64) for _ in range(stream.heads)]
    done = 0
    for remaining in stream.calls() if calls is None else calls:
        while remaining:
            room = terms.room(len(cached[0]), done)
            if room <= 0:
                room = terms.drop or eviction_size(policy, budget, prompt=done < stream.prompt)
                eviction = _evict(policy, budget, state, cached, done - 1, room)
                outcome.evictions.append(eviction)
                cached = eviction.kept
                for h, positions in enumerate(eviction.dropped):
                    outcome.e[h, positions] = done
            n = min(remaining, room)
            new = np.arange(done, done + n)
            cached = [np.concatenate([positions, new]) for positions in cached]
            outcome.max_slots = max(outcome.max_slots, len(cached[0]))
            state.observe(Observation(cached, done, n))
            done, remaining = done + n, remaining - n
    outcome.final = cached
    return outcome
