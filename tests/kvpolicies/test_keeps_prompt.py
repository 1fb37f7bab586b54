"""`sinks: prompt`, a rule of the budget; and policies that a budget leaves nothing to choose."""

from __future__ import annotations

import warnings

import pytest
import torch

import kvpolicies
from kvpolicies.admission import scheduled
from kvpolicies.budget import Budget, BudgetSpec
from kvpolicies.config import Deployment, dump_yaml, from_mapping
from kvpolicies.errors import Caution, UserError
from kvpolicies.registry import resolve
from kvpolicies.sampling import Sampling
from kvpolicies.serving import serving
from kvpolicies.trace import NEVER
from tests.support.models import prompts, tiny

KEEPS = Budget.parse(40, sinks="prompt", window=4)
PROMPTS = prompts(3, 21, 12)


def times(policy: str, budget: Budget, tokens: list[list[int]]) -> list[torch.Tensor]:
    done = kvpolicies.generate(
        tiny(), tokens, policy, budget, max_new_tokens=45, eos_token_id=-1, trace=True
    )
    return [one.trace.times[0] for one in done if one.trace]


@pytest.mark.parametrize(
    "policy",
    ["streaming", "h2o", "lazy", "rpc(observe_window=4)", "beacon(n_beacon=4, n_recent=4)"],
)
def test_the_whole_prompt_stays_and_the_rest_is_chosen_as_ever(policy: str) -> None:
    for prompt, own in zip(PROMPTS, times(policy, KEEPS, PROMPTS), strict=True):
        assert (own[..., : len(prompt)] == NEVER).all()
        assert (own[..., len(prompt) :] != NEVER).any()
        (alone,) = times(policy, Budget(40, len(prompt), 4), [prompt])
        assert torch.equal(own, alone)


def test_a_prompt_that_leaves_nothing_to_choose_is_refused_in_one_line() -> None:
    for tokens, fits in [(35, True), (36, False)]:
        if fits:
            assert KEEPS.for_prompt(tokens) == Budget(40, tokens, 4)
            continue
        with pytest.raises(
            UserError, match=r"total 40 .*prompt's 36 tokens.* window 4 = 40"
        ) as said:
            kvpolicies.generate(tiny(), prompts(5, 36), "tova", KEEPS, max_new_tokens=2)
        assert "\n" not in str(said.value)
    with serving(tiny(), "tova", KEEPS, rows=1, max_length=90) as engine:
        engine.request(0, [5] * 35, 9, Sampling())
        with pytest.raises(UserError, match="prompt's 36 tokens"):
            engine.request(1, [5] * 36, 9, Sampling())


def test_where_prompts_are_not_known_beforehand_it_wants_them() -> None:
    with pytest.raises(UserError, match=r"budget\.for_prompt\(n\)"):
        kvpolicies.FixedBudgetCache(tiny(), "streaming", KEEPS)
    schedule = resolve("streaming").schedule(KEEPS.for_prompt(9), 9, 9)
    kvpolicies.FixedBudgetCache(tiny(), "streaming", schedule)


def test_it_is_an_option_like_any_number() -> None:
    given = from_mapping(Deployment, {"sinks": "prompt", "budget": "25%"}, "x.yaml")
    assert given.budget_spec.of(400) == Budget(100, 0, 25, keeps_prompt=True)
    assert "sinks: prompt" in dump_yaml(given)
    assert from_mapping(Deployment, {"sinks": "6"}, "x.yaml").sinks == 6
    for wrong in ("prompts", "4.5", "-1", ""):
        with pytest.raises(UserError, match="sinks must be a whole number"):
            from_mapping(Deployment, {"sinks": wrong}, "x.yaml")
    with pytest.raises(UserError, match="prompt, got 'all'"):
        BudgetSpec("64", sinks="all")


@pytest.mark.parametrize(
    ("policy", "chooses", "does_not"),
    [
        ("rpc", 42, 41),
        ("snapkv", 42, 41),
        ("rkv(alpha=32)", 42, 41),
        ("beacon(n_recent=32)", 43, 42),
        ("lazy", 16, None),
        ("tova", 13, None),
        ("rpc(observe_window=8)", 14, None),
    ],
)
def test_a_policy_that_has_nothing_to_choose_is_cautioned_about(
    policy: str, chooses: int, does_not: int | None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduled(resolve(policy), Budget(chooses, 4, 8), 9, 9)
    if does_not:
        with pytest.warns(Caution, match=f"at {does_not} slots keeps sinks and the newest tokens"):
            scheduled(resolve(policy), Budget(does_not, 4, 8), 9, 9)
