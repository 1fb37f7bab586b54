"""The cache's invariants at every step, and its refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.policy import Geometry
from kvpolicies.registry import resolve
from kvpolicies.rope import Rope
from kvpolicies.slots import SlotGroup
from kvpolicies.step import LayerInput
from tests.support.futures import random_future
from tests.support.layer import OneLayer, process
from tests.support.models import padded, prompts, tiny
from tests.support.reading import Reading
from tests.support.specs import EVICTING, OWN_RULES, PROTECTING


def plain_rope(dim: int) -> Rope:
    def cos_sin(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[..., None] / 100 ** (torch.arange(dim // 2) * 2 / dim)
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    return Rope(cos_sin)


def check(layer: OneLayer, budgets: list[Budget], protected: bool) -> None:
    """What must be true of a layer between any two steps."""
    for row, budget in enumerate(budgets):
        schedule, n, seen = layer.schedule(row), layer.lengths[row], layer.seen[row]
        assert n <= schedule.capacity and layer.peak[row] <= schedule.capacity
        positions = layer.positions[row]
        assert (positions[:, n:] == -1).all() and (positions[:, :n] >= 0).all()
        for held in positions[:, :n].tolist():
            assert len(set(held)) == n, "a position twice in a head"
            assert max(held, default=-1) == seen - 1
            if protected:
                must = {*range(min(budget.sinks, seen)), *range(max(0, seen - budget.window), seen)}
                assert must <= set(held)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("spec", EVICTING)
def test_invariants_hold_at_every_step(spec: str, data: st.DataObject) -> None:
    integers = st.integers
    heads, groups = data.draw(integers(1, 3)), data.draw(integers(1, 3))
    rows, dim = data.draw(integers(1, 3)), 2 * data.draw(integers(1, 4))
    budgets = []
    for _ in range(rows):
        sinks, window = data.draw(integers(0, 4)), data.draw(integers(0, 6))
        budgets.append(Budget(sinks + window + data.draw(integers(1, 20)), sinks, window))
    slots = max(b.total for b in budgets)
    geometry = Geometry(rows, heads, groups, slots, dim, torch.float32, torch.device("cpu"), 400)
    layer = OneLayer(geometry, resolve(spec), 0, plain_rope(dim))
    stores = [layer.keys.data_ptr(), layer.values.data_ptr(), layer.positions.data_ptr()]
    for row, budget in enumerate(budgets):
        layer.reset(row, budget, row, random_future(heads, groups, 360, dim, row))
    g = torch.Generator().manual_seed(data.draw(integers(0, 99)))
    for _ in range(data.draw(integers(1, 12))):
        counts = [data.draw(st.sampled_from([0, 1, 1, 1, 5, 30])) for _ in range(rows)]
        width = max(counts)
        if not width:
            continue
        q = torch.randn(rows, heads, groups, width, dim, generator=g)
        k, v = torch.randn(2, rows, heads, width, dim, generator=g)
        process(layer, LayerInput(q, k, v, None, LogitTransform(0.5)), range(rows), counts)
        check(layer, budgets, spec in PROTECTING)
    assert stores == [layer.keys.data_ptr(), layer.values.data_ptr(), layer.positions.data_ptr()]


@pytest.mark.parametrize("spec", EVICTING)
def test_a_decode_step_never_waits_for_the_device(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number is read back from a tensor, through appends, evictions and observations."""
    # On a CPU there is nothing to wait for, and NaN is looked for at once.
    monkeypatch.setattr(SlotGroup, "check_scores", lambda self: None)
    geometry = Geometry(2, 2, 2, 40, 8, torch.float32, torch.device("cpu"), 100)
    layer = OneLayer(geometry, resolve(spec), 0, plain_rope(8))
    for row, budget in enumerate([Budget(40, 2, 8), Budget(32, 2, 8)]):
        layer.reset(row, budget, row, random_future(2, 2, 80, 8, row))
    reading = Reading()
    for n in [20] + [1] * 60:
        q, k = torch.randn(2, 2, 2, n, 8), torch.randn(2, 2, n, 8)
        with reading:
            process(layer, LayerInput(q, k, k, None, LogitTransform(0.5)), [0, 1], [n, n])
    assert layer.seen == [80, 80] and layer.peak == [40, 32]
    assert reading.seen == []


def test_streaming_keeps_exactly_its_sinks_and_newest_after_100_evictions() -> None:
    (out,) = kvpolicies.generate(
        tiny(),
        prompts(20),
        "streaming",
        Budget(24, 4, 8),
        max_new_tokens=130,
        eos_token_id=-1,
        trace=True,
    )
    assert out.trace is not None
    last = out.trace.times.shape[-1] - 1
    assert last > 24 + 100
    expected = {*range(4), *range(last - 19, last + 1)}
    for head in out.trace.kept(last)[0].flatten(0, 1):
        assert set(head.nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("spec", EVICTING)
def test_bytes_reported_are_bytes_allocated(spec: str) -> None:
    cache = kvpolicies.FixedBudgetCache(tiny(), spec, Budget(32, 2, 8), max_length=64)
    cache.allocate(3, torch.float32, torch.device("cpu"))

    def walk(x: Any) -> int:
        if isinstance(x, torch.Tensor):
            return x.untyped_storage().nbytes()
        if isinstance(x, dict):
            return sum(map(walk, x.values()))
        return sum(map(walk, x)) if isinstance(x, list | tuple) else 0

    # Everything that groups hold, found by looking, but for the model's own weights, and for a flag
    # of one byte a layer.
    held = [{**vars(group), "outputs": None} for group in cache.groups]
    total = sum(map(walk, held))
    flags = len(cache.layer_index)
    assert 3 * (cache.cache_bytes() + cache.state_bytes()) == total - flags
    for group in cache.groups:
        assert len({t.data_ptr() for t in group.stored}) == 3 + len(group.slot_state)


def test_memory_is_allocated_once_and_for_slots_only() -> None:
    cache = kvpolicies.FixedBudgetCache(tiny(), "streaming", Budget(32, 2, 8))
    cache.allocate(2, torch.float32, torch.device("cpu"))
    layers, heads, slots, dim = 2, 2, 32, 16
    assert cache.cache_bytes() == layers * heads * slots * (2 * dim * 4 + 4)


def generate(
    model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None, **kw: Any
) -> Any:
    kw = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **kw}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **kw)


def test_a_cache_outside_of_attach_is_refused() -> None:
    model = tiny()
    cache = kvpolicies.FixedBudgetCache(model, "streaming", 64)
    with pytest.raises(UserError, match="attach"):
        generate(model, cache, *padded(prompts(5)))


def test_a_call_without_the_attached_cache_is_refused() -> None:
    """It would attend to the new tokens alone, without a word."""
    from transformers import DynamicCache

    model = tiny()
    cache = kvpolicies.FixedBudgetCache(model, "streaming", 64)
    ids, mask = padded(prompts(5, 9))
    with kvpolicies.attach(model, cache):
        for other in (None, DynamicCache(), kvpolicies.FixedBudgetCache(model, "streaming", 64)):
            with pytest.raises(UserError, match="attach"):
                generate(model, other, ids, mask)
        cache.reset()
        generate(model, cache, ids, mask)


def test_attaching_twice_is_refused_and_leaves_the_first_in_place() -> None:
    model = tiny()
    caches = [kvpolicies.FixedBudgetCache(model, "streaming", 64) for _ in range(2)]
    with kvpolicies.attach(model, caches[0]):
        with pytest.raises(UserError, match="already"), kvpolicies.attach(model, caches[1]):
            pass
        generate(model, caches[0], *padded(prompts(5)))
    assert model.config._attn_implementation != "kvpolicies"


def test_other_uses_are_refused_by_name() -> None:
    model = tiny()
    ids, mask = padded(prompts(5, 9))

    def attempt(message: str, batch: torch.Tensor, padding: torch.Tensor, **kw: Any) -> None:
        cache = kvpolicies.FixedBudgetCache(model, "streaming", 64)
        with pytest.raises(UserError, match=message), kvpolicies.attach(model, cache):
            generate(model, cache, batch, padding, **kw)

    attempt("on the left", ids.flip(1), mask.flip(1))
    attempt("beam search", ids, mask, num_beams=2)
    cache = kvpolicies.FixedBudgetCache(model, "streaming", 64)
    with kvpolicies.attach(model, cache):
        generate(model, cache, ids, mask)
        with pytest.raises(UserError, match="rows"):
            model(ids[:1], past_key_values=cache)
    cache = kvpolicies.FixedBudgetCache(model, "streaming", 64)
    with pytest.raises(UserError, match="position_ids"), kvpolicies.attach(model, cache):
        model(ids[1:], past_key_values=cache, position_ids=torch.arange(9)[None] + 7)


def test_a_hand_written_loop_without_position_ids_counts_on() -> None:
    """Positions go on after evictions, though the cache holds fewer slots than tokens seen."""
    model, prompt = tiny(), prompts(40)[0]
    budget = Budget(16, 2, 4)
    expected = kvpolicies.generate(
        model, [prompt], "snapkv", budget, max_new_tokens=12, eos_token_id=-1
    )
    cache = kvpolicies.FixedBudgetCache(model, "snapkv", budget)
    tokens, new = torch.tensor([prompt]), []
    with torch.no_grad(), kvpolicies.attach(model, cache):
        for _ in range(12):
            tokens = model(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
            new.append(int(tokens))
    assert new == expected[0].tokens


def test_models_that_cannot_work_are_refused_by_name() -> None:
    from transformers import DeepseekV3Config, MambaConfig, T5Config

    class Fake(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config

    for config, word in [
        (T5Config(), "encoder-decoder"),
        (DeepseekV3Config(), "latent"),
        (MambaConfig(), "linear_attention|state-space"),
    ]:
        with pytest.raises(UserError, match=f"{config.model_type}.*{word}"):
            kvpolicies.FixedBudgetCache(Fake(config), "streaming", 64)


@pytest.mark.parametrize("spec", OWN_RULES)
def test_a_papers_own_rule_wants_a_schedule(spec: str) -> None:
    """Else `model.generate` would run another rule than the policy's name says."""
    policy = resolve(spec)
    with pytest.raises(UserError, match=r"policy\.schedule"):
        kvpolicies.FixedBudgetCache(tiny(), spec, Budget(32, 2, 8))
    schedule = policy.schedule(Budget(32, 2, 8), 20, 10)
    kvpolicies.FixedBudgetCache(tiny(), policy, schedule)


def test_numbers_beyond_use_are_refused() -> None:
    huge = ("beacon(n_beacon=1000000000)", f"random(seed={10**30})", "snapkv(observe_window=99999)")
    for spec in huge:
        with pytest.raises(UserError, match=r"must lie in|at most"):
            resolve(spec)
