"""Quotas around any policy's scores: segments of the cache keep a share each (arXiv 2605.23200).

A global top-k can empty whole passages. Here tokens are cut into segments that draw about equal
attention, and each keeps at least a few; which ones, the policy's own scores say.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.eviction import LAST, sortable
from kvpolicies.kernels.weights import observation_weights
from kvpolicies.observation import average_pool, write_newest
from kvpolicies.options import check_options, option
from kvpolicies.policy import (
    MOST_QUERIES,
    Geometry,
    Observation,
    Policy,
    Schedule,
    Scores,
    View,
)

QUERIES, WHEN, CREDIT = "quota queries", "quota when", "quota credit"


@dataclass(frozen=True, kw_only=True)
class MassQuota(Policy):
    """A policy whose top-k is shared out among segments: `beacon(quota='ams')`.

    At an eviction, m is the attention of the `observe_window` newest queries to the tokens in
    question (mean over queries, average-pooled along positions, mean over the group), as shares;
    credit c, kept with the token, becomes 0.8 c + 0.2 m; the mass is 0.7 m + 0.3 c, as shares. A
    segment begins with the token whose mass passes a multiple of `step`; of more than `longest`
    tokens it is cut, and of fewer than `shortest` joined with the next. Each keeps its best `least`
    tokens; the other slots go to segments in proportion to their mass (Sainte-Lague's divisors, so
    that the sum is exact).

    Sinks and window lie outside of the segments: the common rule keeps them. The authors cut and
    round over all tokens, and correct the sum in order.

    Raises:
        UserError: for a policy that has nothing to share out, or a value that cannot be.
    """

    base: Policy
    """Whose scores rank the tokens of a segment."""
    observe_window: int = option(32, least=1, most=MOST_QUERIES)
    """Newest queries whose attention is the mass."""
    step: float = option(0.02, above=0, most=1)
    """Mass of a segment."""
    shortest: int = option(32, least=1)
    """Tokens of a segment at least."""
    longest: int = option(1024, least=1)
    """Before short ones are joined, tokens of a segment at most."""
    least: int = option(8, least=0)
    """Tokens that each segment keeps."""

    def __post_init__(self) -> None:
        if not self.base.evicts or self.base.rerotates:
            why = "evicts nothing" if not self.base.evicts else "scores by rank in the cache"
            raise UserError(f"policy {self.base}: {why}, so that quota has no effect; leave it out")
        check_options(self, "quota: ")

    def __str__(self) -> str:
        spec = str(self.base)
        return f"{spec[:-1]}, quota='ams')" if spec.endswith(")") else f"{spec}(quota='ams')"

    @property
    def slot_tensors(self) -> Mapping[str, torch.dtype]:  # type: ignore[override]
        """The policy's own, and the credit."""
        return {**self.base.slot_tensors, CREDIT: torch.float32}

    @property
    def observes(self) -> bool:
        """Always: it keeps the newest queries."""
        return True

    def check_model(self, model: Any) -> None:
        """The policy's own check."""
        self.base.check_model(model)

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """The policy's own."""
        return self.base.schedule(budget, prompt, limit)

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """The policy's own, and an empty ring of queries."""
        g, n = geometry, self.observe_window
        ring = torch.zeros(g.rows, g.heads, g.groups, n, g.head_dim, dtype=g.dtype, device=g.device)
        when = torch.zeros(g.rows, n, dtype=torch.int32, device=g.device)
        return {**self.base.init_state(geometry), QUERIES: ring, WHEN: when}

    def observe(self, view: View, step: Observation) -> None:
        """The policy observes, and the ring takes in the queries."""
        if self.base.observes:
            self.base.observe(view, step)
        write_newest(view.state[QUERIES], view.state[WHEN], step)

    def evicted(self, view: View) -> None:
        """Tells the policy."""
        self.base.evicted(view)

    def scores(self, view: View) -> Scores:
        """Positive for the best `least` of a segment, then falling by rank over the mass."""
        own, contested = self.base.scores(view), view.contested
        order = view.positions.masked_fill(~contested, LAST).argsort(dim=-1)  # in question, by age
        there = contested.gather(-1, order)
        mass = self._mass(view, contested).gather(-1, order)
        segment = segments(mass, there, self.step, self.shortest, self.longest)
        sums = torch.zeros_like(mass).scatter_add_(-1, segment, mass).gather(-1, segment)
        positions = view.positions.gather(-1, order)
        rank = _rank(own.gather(-1, order), positions, segment).float()
        rest = (self.least - 0.5 - rank) / sums.clamp_min(torch.finfo(mass.dtype).tiny)
        made = torch.where(rank < self.least, self.least - rank, rest)
        return torch.empty_like(made).scatter_(-1, order, made)

    def _mass(self, view: View, among: Tensor) -> Tensor:
        """[B, H, L] shares of the tokens `among`; renews the credit."""
        when = view.state[WHEN]
        seen = (when - 1, view.positions, view.softmax, when > 0)
        weights = observation_weights(view.state[QUERIES], view.keys, *seen)
        mean = weights.sum(dim=3) / (when > 0).sum(dim=1).clamp_min(1)[:, None, None, None]
        pooled = average_pool(mean * among[:, :, None], view.positions, 5).mean(dim=2)
        if self.one_set:
            pooled = pooled.mean(dim=1, keepdim=True).expand(among.shape)
        now, credit = _shares(pooled, among), view.slot_state[CREDIT]
        credit.copy_(0.8 * credit + 0.2 * now)
        return _shares(0.7 * now + 0.3 * _shares(credit, among), among)


def _of_base(name: str) -> property:
    return property(lambda self: getattr(self.base, name))


for _name in (
    "name", "source", "evicts", "needs_attention", "needs_input", "needs_future", "mixes_heads",
    "one_set", "layers_alike", "needs_output", "needs_rope", "whole_prompts", "rerotates",
    "own_rule", "made_for",
):  # fmt: skip
    setattr(MassQuota, _name, _of_base(_name))


def segments(mass: Tensor, there: Tensor, step: float, shortest: int, longest: int) -> Tensor:
    """The segment of each token, counted from 0, int64.

    Args:
        mass: [B, H, L] shares of tokens in order of position; there: [B, H, L] bool, those that
            count, which come first; the others get the segment L - 1 or less, behind all.
    """
    length = mass.shape[-1]
    at = torch.arange(length, device=mass.device).expand(mass.shape)
    most = math.ceil(1 / step) - 1  # the whole is no place to cut
    passed = (mass.cumsum(dim=-1) / step).floor().clamp_max(most)
    fresh = torch.ones_like(there)
    fresh[..., 1:] = passed[..., 1:] != passed[..., :-1]
    fresh[..., 1:2] |= passed[..., :1] > 0
    begin = at.masked_fill(~fresh, 0).cummax(dim=-1).values
    cut = (at - begin) % longest == 0
    cut &= there
    # Where the next cut is, from each token on; behind the last there is the end.
    end = there.sum(dim=-1, keepdim=True)
    following = torch.where(cut, at, length).flip(-1).cummin(dim=-1).values.flip(-1)
    following = torch.nn.functional.pad(following, (0, 1), value=length)
    starts = torch.zeros(*mass.shape[:2], length + 1, dtype=torch.long, device=mass.device)
    start = torch.zeros_like(end)
    for _ in range(-(-length // shortest)):
        starts.scatter_(-1, start, 1)
        start = torch.minimum(following.gather(-1, (start + shortest).clamp_max(length)), end)
    starts.scatter_(-1, end, 1)
    return starts[..., :length].cumsum(dim=-1) - 1


def _rank(scores: Tensor, positions: Tensor, segment: Tensor) -> Tensor:
    """[B, H, L]: how many of its segment stand before each token; of equal scores the newer."""
    key = (sortable(scores.float() + 0.0).long() << 32) | positions.long()
    best = key.argsort(dim=-1, descending=True)
    grouped = segment.gather(-1, best).argsort(dim=-1, stable=True)
    order = best.gather(-1, grouped)
    of = segment.gather(-1, order)
    at = torch.arange(of.shape[-1], device=of.device).expand(of.shape)
    first = torch.ones_like(of, dtype=torch.bool)
    first[..., 1:] = of[..., 1:] != of[..., :-1]
    rank = at - at.masked_fill(~first, 0).cummax(dim=-1).values
    return torch.empty_like(rank).scatter_(-1, order, rank)


def _shares(x: Tensor, among: Tensor) -> Tensor:
    """x [B, H, L] of the tokens `among`, summing to one."""
    x = (x + 1e-12) * among
    return x / x.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
