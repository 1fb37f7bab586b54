"""State charged to the budget: all policies hold the same bytes, up to a slot."""

import pytest

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from tests.support.models import prompts, tiny

BUDGET = Budget(64, 2, 8)


def run(spec: str, budget: Budget = BUDGET, charge: bool = True) -> kvpolicies.Generation:
    options = {"max_new_tokens": 90, "eos_token_id": -1, "charge_state": charge}
    (made,) = kvpolicies.generate(tiny(), prompts(20), spec, budget, **options)
    return made


@pytest.mark.parametrize(
    "spec",
    [
        "streaming",
        "random",
        "h2o",
        "lazy",
        "snapkv(observe_window=4)",
        "beacon(n_beacon=4, n_recent=4)",
        "kvpop(scorer='random/kvpop')",
        "kvpop_mlp(scorer='random/kvpop_mlp')",
    ],
)
def test_slots_and_state_together_are_worth_the_budget(spec: str) -> None:
    config = tiny().config
    pair = 2 * config.head_dim * 4 + 4
    slot = config.num_hidden_layers * config.num_key_value_heads * pair
    made = run(spec)
    assert made.max_slots == made.budget_total <= BUDGET.total
    held = made.cache_bytes + made.state_bytes
    assert made.cache_bytes == made.budget_total * slot
    # What a policy keeps for each slot is priced at the slots asked for: at most 8 bytes each.
    spared = 8 * (BUDGET.total - made.budget_total) * slot / pair
    assert BUDGET.total * slot - slot - spared < held <= BUDGET.total * slot


def test_full_pays_nothing_and_without_charge_nobody_does() -> None:
    assert run("full").budget_total == 110
    assert run("beacon(n_beacon=4, n_recent=4)", charge=False).budget_total == BUDGET.total


def test_a_state_as_large_as_the_budget_is_refused() -> None:
    with pytest.raises(UserError, match=r"its state is worth \d+ slots a head, and a budget of 64"):
        run("beacon(n_beacon=64, n_recent=64)")
    with pytest.raises(UserError, match="its paper's own rule"):
        run("h2o(faithful=True)")
