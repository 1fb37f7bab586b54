"""Prompts on their way through the decode loop: checked before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvpolicies.budget import AnyBudget, Budget, BudgetSpec
from kvpolicies.charging import charged
from kvpolicies.errors import UserError, caution, whole
from kvpolicies.layer_shares import EVEN
from kvpolicies.policy import Geometry, Policy, Schedule, Schedules
from kvpolicies.sampling import Sampling


@dataclass
class Request:
    """A prompt on its way: what it is, and how far it has come."""

    index: int
    identity: int
    prompt: list[int]
    limit: int
    budget: Budget
    schedule: Schedules
    sampling: Sampling
    random: np.random.Generator
    forced: list[int] | None
    cancelled: bool = False
    """Set from any thread, and never unset: the loop gives its row back within a forward."""
    row: int = -1
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    reported: int = 0
    """New tokens that events have told of."""
    seconds: float = 0.0
    processor: float = 0.0

    @property
    def to_feed(self) -> list[int]:
        """All tokens that a forced request will have processed: the last new one never is."""
        return [*self.prompt, *(self.forced or [])][: len(self.prompt) + self.limit - 1]

    @property
    def waiting(self) -> int:
        """Prompt tokens not yet processed."""
        return max(0, len(self.prompt) - self.fed)

    def next_token(self, step: int) -> int:
        """The token to feed `step` decode steps from now: known beforehand only if forced."""
        tokens = self.tokens if step == 0 else (self.forced or [])
        return tokens[len(self.tokens) + step - 1]


def admit(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    budget: AnyBudget,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    identities: Sequence[int],
    forced: Sequence[Sequence[int]] | None,
    layers: int,
    charge: Geometry | None = None,
) -> list[Request]:
    """One request a prompt.

    Args:
        layers: those of the model that are evicted.
        charge: the model's sizes, where the policy's state is charged to its budget.

    Raises:
        UserError: for an empty prompt, a limit below one, lists of unequal length, a budget that
            is impossible for any of the prompts, or a policy that looks ahead into the unknown.
    """
    if policy.needs_future and forced is None:
        raise UserError(
            f"policy {policy} looks ahead in a recorded full run: it needs forced tokens "
            "(generate(..., forced=...); compare feeds it full's own)"
        )
    asked = _asked(max_new_tokens, len(prompts))
    limits = _limits(asked, forced)
    if len(identities) != len(prompts):
        raise UserError(f"{len(identities)} request_ids given for {len(prompts)} prompts")
    requests = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise UserError(
                f"prompt {i}: expected a list of token ids, got {type(prompt).__name__}"
            )
        if len(prompt) == 0:
            raise UserError(f"prompt {i} has no tokens; every prompt needs at least one")
        # A ratio is one of all that was asked for, even where less is forced.
        own = asked_for(policy, budget, len(prompt) + limits[i], len(prompt) + asked[i])
        if charge and policy.evicts:
            longest = replace(charge, length=len(prompt) + limits[i])
            own = charged(policy, own.for_prompt(len(prompt)), longest)
        goal = None if forced is None else [int(t) for t in forced[i]]
        random = sampling.generator(identities[i])
        ids = [int(t) for t in prompt]
        schedule = scheduled_layers(policy, own, len(prompt), limits[i], layers)
        requests.append(
            Request(i, identities[i], ids, limits[i], own, schedule, sampling, random, goal)
        )
    return requests


def _asked(max_new_tokens: int | Sequence[int], n: int) -> list[int]:
    many = isinstance(max_new_tokens, Sequence)
    asked = list(max_new_tokens) if many else [max_new_tokens] * n
    for limit in asked:
        whole(limit, 1, "max_new_tokens")
    if len(asked) != n:
        raise UserError(f"{len(asked)} values of max_new_tokens given for {n} prompts")
    return asked


def asked_for(policy: Policy, budget: AnyBudget, longest: int, length: int) -> Budget:
    """The budget that one sequence is given: room for all of it if the policy never evicts.

    Args:
        longest: most tokens that it will have. length: what a ratio is taken of.

    Raises:
        UserError: for an impossible budget.
    """
    if not policy.evicts:
        return Budget(longest, sinks=0, window=0, kv_dtype=_stored(budget))
    return Budget.parse(budget, length=length)


def _stored(budget: AnyBudget) -> str:
    """What a budget stores keys and values in, however little else of it counts."""
    if isinstance(budget, str | int):  # where nothing is evicted, any text without a colon will do
        return BudgetSpec(str(budget)).stored if ":" in str(budget) else "auto"
    return budget.kv_dtype if isinstance(budget, Budget) else budget.stored


def scheduled(policy: Policy, budget: Budget, prompt: int, limit: int) -> Schedule:
    """What the policy makes of a budget for a prompt of so many tokens and `limit` new ones.

    Cautions where it has nothing left to choose.

    Raises:
        UserError: for a budget that is impossible for the policy, or for the prompt.
    """
    budget = budget.for_prompt(prompt)
    schedule = policy.schedule(budget, prompt, limit)
    free = schedule.capacity - schedule.sinks - schedule.drop
    if not policy.own_rule and budget.window < schedule.window >= free:
        caution(
            f"{policy} at {budget.total} slots keeps sinks and the newest tokens, as streaming "
            f"does: of the newest it protects {schedule.window} by itself, and beside "
            f"{schedule.sinks} sinks that is all; it needs more slots, or fewer queries that look"
        )
    return schedule


def scheduled_layers(
    policy: Policy, budget: Budget, prompt: int, limit: int, layers: int
) -> Schedules:
    """`scheduled` where layers may share a budget unevenly: one schedule, or one a layer.

    Args:
        layers: those of the model that are evicted.

    Raises:
        UserError: as `scheduled`; a way of sharing that is none for so many layers.
    """
    if budget.layers == EVEN or not policy.evicts:
        return scheduled(policy, budget, prompt, limit)
    if not layers:
        raise UserError(f"layers {budget.layers}: every layer of the model has a sliding window")
    own = budget.for_prompt(prompt).by_layer(layers)
    return tuple(scheduled(policy, one, prompt, limit) for one in own)


def _limits(asked: list[int], forced: Sequence[Sequence[int]] | None) -> list[int]:
    if forced is None:
        return asked
    if len(forced) != len(asked):
        raise UserError(f"{len(forced)} forced continuations given for {len(asked)} prompts")
    limits = [min(m, len(f)) for m, f in zip(asked, forced, strict=True)]
    if any(m < 1 for m in limits):
        raise UserError("a forced continuation has no tokens")
    return limits
