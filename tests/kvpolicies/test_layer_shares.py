"""Budgets that layers share unevenly: exact in each layer and in sum, whatever the policy."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvpolicies
from kvpolicies.budget import Budget, BudgetSpec
from kvpolicies.config import Deployment
from kvpolicies.errors import UserError
from kvpolicies.layer_shares import apportion, mean, shares_of
from kvpolicies.models import memory
from kvpolicies.registry import resolve
from kvpolicies.sampling import Sampling
from kvpolicies.serving import serving
from kvpolicies.vllm.refusals import check_budget
from tests.support.models import padded, prompts, tiny

LAYERS = 5
PYRAMID = Budget(40, 2, 8, layers="pyramid")
POLICIES = (
    "streaming", "h2o", "tova", "rkv(every=8)", "random", "lazy(every=8)",
    "beacon(n_beacon=4, n_recent=4)", "snapkv(observe_window=4)", "keydiff(quota='ams')",
)  # fmt: skip


def run(rows: list[list[int]], spec: str, budget: Any = PYRAMID, **options: Any) -> list[Any]:
    return kvpolicies.generate(
        tiny("qwen3", layers=LAYERS), rows, spec, budget, max_new_tokens=20, eos_token_id=-1,
        request_ids=[0] * len(rows), trace=True, **options,
    )  # fmt: skip


def test_a_pyramid_is_linear_and_exact_in_sum() -> None:
    totals = [b.total for b in Budget(110, 2, 8, layers="pyramid").by_layer(5)]
    # One slot each, and of 99 more beside sinks and window 1.95, 1.475, 1, .525, .05 times as many.
    assert totals == [204, 157, 110, 63, 16]
    assert sum(totals) == 5 * 110
    assert [b.total for b in Budget(110, 2, 8).by_layer(3)] == [110] * 3


@pytest.mark.parametrize("number", range(40))
def test_any_shares_are_exact_in_sum_and_none_is_empty(number: int) -> None:
    rng = np.random.default_rng(number)
    count = int(rng.integers(1, 40))
    total = count * int(rng.integers(1, 50))
    shares = rng.exponential(size=count).tolist()
    found = apportion(total, [Fraction(s) for s in shares])
    assert sum(found) == total and min(found) >= 1
    exact = [1 + (total - count) * s / sum(shares) for s in shares]
    assert all(abs(n - x) < 1 for n, x in zip(found, exact, strict=True))


@pytest.mark.parametrize("spec", POLICIES)
def test_each_layer_holds_its_own_budget_and_no_more(spec: str) -> None:
    totals = torch.tensor([b.total for b in PYRAMID.by_layer(LAYERS)])
    (out,) = run(prompts(100, seed=3), spec)
    n = out.trace.times.shape[-1]
    held = torch.stack([out.trace.cache_length(q)[0] for q in range(n)])  # [query, layer, head]
    most = held.amax((0, 2))
    assert (most <= totals).all()
    # The largest slot count of each layer is its own budget, not another's.
    full = ("streaming", "h2o", "tova", "random")
    if spec in full:
        assert torch.equal(most, totals)
        assert out.max_slots == PYRAMID.total
    query = torch.arange(n)
    past, age = query <= query[:, None], query[:, None] - query
    kept = past & (query[:, None] < out.trace.times[..., None, :])
    assert (kept | ~(past & ((query < 2) | (age < 8)))).all()


@pytest.mark.parametrize("spec", POLICIES)
def test_decoding_equals_its_replay_and_a_row_is_the_row_alone(spec: str) -> None:
    rows, decoded = prompts(9, 70, 100, seed=1), {}
    together = run(rows, spec)
    for row, beside in zip(rows, together, strict=True):
        (alone,) = run([row], spec, on_logits=lambda _, step, x: decoded.update({step: x}))
        assert alone.tokens == beside.tokens
        assert torch.equal(alone.trace.times, beside.trace.times)
        logits = kvpolicies.replay(tiny("qwen3", layers=LAYERS), alone.trace)
        for step, x in decoded.items():
            assert (logits[0, len(row) - 1 + step] - x).abs().max() <= 1e-4
    fixed = run(rows, spec, step="fixed")
    assert [out.tokens for out in fixed] == [out.tokens for out in together]


def test_equal_shares_keep_what_an_even_budget_keeps(tmp_path: Path) -> None:
    file = tmp_path / "even.yaml"
    file.write_text("shares: [3, 3, 3, 3, 3]\n")
    even = run(prompts(70, 9), "h2o", Budget(40, 2, 8))
    told = run(prompts(70, 9), "h2o", Budget(40, 2, 8, layers=str(file)))
    for a, b in zip(even, told, strict=True):
        assert a.tokens == b.tokens and torch.equal(a.trace.times, b.trace.times)
        assert (a.cache_bytes, a.max_slots) == (b.cache_bytes, b.max_slots)


def test_slots_are_allocated_at_each_layers_size_and_bytes_say_so() -> None:
    model, even = tiny("qwen3", layers=LAYERS), Budget(40, 2, 8)
    cache = kvpolicies.FixedBudgetCache(model, "tova", PYRAMID)
    cache.allocate(1, torch.float32, torch.device("cpu"))
    slots = [cache.groups[cache.layer_index[y][0]].geometry.slots for y in range(LAYERS)]
    assert slots == [b.total for b in PYRAMID.by_layer(LAYERS)]
    a_slot = 2 * (2 * 16 * 4 + 4)  # two heads; key and value of 16 floats, position
    assert cache.cache_bytes() == sum(slots) * a_slot == LAYERS * even.total * a_slot
    one = memory.predict(model, "tova", PYRAMID, 1, 100, 20)
    assert one.cache == cache.cache_bytes() == run(prompts(100), "tova")[0].cache_bytes


def test_transformers_own_loop_and_a_server_keep_the_same() -> None:
    model, rows = tiny("qwen3", layers=LAYERS), prompts(9, 70, seed=2)
    ours = run(rows, "h2o")
    ids, mask = padded(rows)
    cache = kvpolicies.FixedBudgetCache(model, "h2o", PYRAMID)
    with kvpolicies.attach(model, cache):
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0,
            eos_token_id=None, past_key_values=cache,
        )  # fmt: skip
    assert out[:, ids.shape[1] :].tolist() == [one.tokens for one in ours]
    totals = [b.total for b in PYRAMID.by_layer(LAYERS)]
    assert cache.layer_slots(1) == totals and cache.max_slots(1) == mean(totals) == 40
    tokens: dict[int, list[int]] = {0: [], 1: []}
    server = serving(model, "h2o", PYRAMID, rows=1, max_length=120, eos_token_id=-1)
    with server as engine, torch.no_grad():
        for i, row in enumerate(rows):
            engine.loop.add(engine.request(i, row, 20, Sampling()))
        while engine.loop.busy:
            for event in engine.loop.advance():
                tokens[event.index].extend(event.tokens)
    assert [tokens[0], tokens[1]] == [one.tokens for one in ours]


def test_charged_state_is_shared_out_too() -> None:
    (out,) = run(prompts(100), "random", charge_state=True)
    assert out.max_slots == out.budget_total < 40


def test_a_budget_says_how_it_is_shared() -> None:
    assert BudgetSpec("0133:pyramid").text == "133:pyramid"
    assert BudgetSpec("133:pyramid").of(None).layers == "pyramid"
    assert BudgetSpec("25%:pyramid").of(400) == Budget(100, 4, 25, layers="pyramid")
    assert BudgetSpec("133", layers="pyramid").of(None).layers == "pyramid"
    assert BudgetSpec("133:even", layers="pyramid").of(None).layers == "even"
    assert BudgetSpec("25%:pyramid").with_total(77) == "77:pyramid"
    assert Deployment(budget="133", layers="pyramid").budget_spec.of(None).layers == "pyramid"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("shares: [1, 2, 3]", "3 shares, and the model has 5 layers"),
        ("shares: [1, -2]", "a number >= 0 a layer"),
        ("shares: [0, 0]", "not all 0"),
        ("share: [1]", "expected shares"),
        ("- 1", "expected shares"),
    ],
)
def test_a_file_that_is_none_is_said(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text(content + "\n")
    with pytest.raises(UserError, match=said):
        shares_of(str(file), 5)


def test_what_cannot_be_shared_so_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'pyramid'"):
        BudgetSpec("133:pyramide")
    for budget in ("50%:pyramid", BudgetSpec("60:pyramid", "prompt")):
        with (
            pytest.raises(UserError, match="the same for every request"),
            serving(tiny(), "h2o", budget, rows=1, max_length=120),
        ):
            pass
    with pytest.raises(UserError, match="vLLM's pages are of one size in every layer"):
        check_budget(BudgetSpec("133:pyramid"), resolve("tova"))
