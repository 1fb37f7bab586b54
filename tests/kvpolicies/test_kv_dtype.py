"""Keys and values in fewer bits: what is kept, what is read, and how many bytes that takes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies.budget import KV_DTYPES, Budget, BudgetSpec
from kvpolicies.charging import state_slots
from kvpolicies.config import Deployment
from kvpolicies.errors import UserError
from kvpolicies.kernels.quantise import dequantise, quantise
from kvpolicies.models import memory
from kvpolicies.policy import Geometry
from kvpolicies.registry import resolve
from kvpolicies.trace import EvictionTrace
from kvpolicies.vllm.refusals import check_budget
from tests.support.models import padded, prompts, tiny

KINDS = KV_DTYPES[1:]
POLICIES = (
    "streaming", "tova", "h2o", "rkv(every=8)", "beacon(n_beacon=4, n_recent=4)",
    "snapkv(observe_window=4)", "keydiff", "criticalkv(observe_window=3)",
    "expected", "vase(observe_window=3)", "keydiff(quota='ams')",
)  # fmt: skip
# Of a slot and head of the tiny model, 16 numbers a vector: key and value, scales, position.
BYTES = {"auto": 132, "bf16": 68, "int8": 40, "fp8": 40, "int4": 24}


def run(rows: list[list[int]], spec: str, kind: str, model: Any = None, **options: Any) -> Any:
    budget = Budget(30, 2, 8, kv_dtype=kind)
    return kvpolicies.generate(
        model or tiny(), rows, spec, budget, max_new_tokens=16, eos_token_id=-1,
        request_ids=[0] * len(rows), trace=True, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def double() -> Any:
    """The tiny model in float64, where two forwards hardly ever disagree about a code."""
    return deepcopy(tiny()).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", POLICIES)
def test_decoding_equals_its_replay_and_a_row_is_the_row_alone(
    spec: str, kind: str, double: Any
) -> None:
    rows, decoded = prompts(9, 70, seed=1), {}
    # Attention weights are made in float32 even of float64: there a code may differ by a step.
    most = 0.02 if resolve(spec).needs_attention else 1e-4
    together = run(rows, spec, kind, double)
    for row, beside in zip(rows, together, strict=True):
        (alone,) = run(
            [row], spec, kind, double, on_logits=lambda _, step, x: decoded.update({step: x})
        )
        assert alone.tokens == beside.tokens and alone.max_slots <= 30
        assert torch.equal(alone.trace.times, beside.trace.times)
        logits = kvpolicies.replay(double, alone.trace)
        for step, x in decoded.items():
            assert (logits[0, len(row) - 1 + step] - x).abs().max() <= most


@pytest.mark.parametrize("kind", KINDS)
def test_float32_agrees_with_its_replay_but_for_codes_at_a_tie(kind: str) -> None:
    (row,), decoded = prompts(40, seed=1), {}
    (out,) = run([row], "h2o", kind, on_logits=lambda _, n, x: decoded.update({n: x}))

    def furthest(trace: EvictionTrace) -> float:
        logits = kvpolicies.replay(tiny(), trace)
        return max(float((logits[0, 39 + n] - x).abs().max()) for n, x in decoded.items())

    # A replay that reads no codes is another run.
    assert furthest(out.trace) < furthest(EvictionTrace(out.trace.times, out.trace.tokens)) / 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["fixed", "transformers"])
def test_each_way_to_decode_keeps_the_same(kind: str, way: str, double: Any) -> None:
    rows = prompts(9, 70, seed=2)
    ours = run(rows, "tova", kind, double)
    if way == "fixed":
        assert [o.tokens for o in run(rows, "tova", kind, double, step="fixed")] == [
            o.tokens for o in ours
        ]
        return
    ids, mask = padded(rows)
    cache = kvpolicies.FixedBudgetCache(double, "tova", Budget(30, 2, 8, kv_dtype=kind))
    with kvpolicies.attach(double, cache):
        out = double.generate(
            ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0,
            eos_token_id=None, past_key_values=cache,
        )  # fmt: skip
    assert out[:, ids.shape[1] :].tolist() == [one.tokens for one in ours]


@pytest.mark.parametrize("kind", KINDS)
def test_slots_hold_the_codes_of_the_keys_that_they_name(kind: str) -> None:
    """After many evictions, what a slot reads back is its own token's key: scales moved along."""
    model, (row,) = tiny(), prompts(60, seed=4)
    plain = kvpolicies.FixedBudgetCache(model, "full", Budget(60, 0, 0))
    cache = kvpolicies.FixedBudgetCache(model, "random", Budget(20, 2, 4, kv_dtype=kind))
    for one in (plain, cache):
        with kvpolicies.attach(model, one), torch.no_grad():
            model(torch.tensor([row]), past_key_values=one)
    whole, group = plain.groups[0], cache.groups[0]
    # The first layer's keys depend on no eviction; the plain cache has token t in slot t.
    n = group.rows.lengths[0]
    positions = group.positions[0, 0, :, :n].long()
    assert (positions >= 0).all() and positions.amax() == 59
    for mine, theirs in zip(group.read(0, slice(0, 1), n), whole.read(0, slice(0, 1)), strict=True):
        expected = dequantise(quantise(theirs, kind), kind)[0]
        wide = positions[..., None].expand(-1, -1, 16)
        assert torch.allclose(mine[0], expected.gather(1, wide), atol=1e-6)


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_bytes_are_those_of_codes_scales_and_positions(kind: str) -> None:
    model, budget = tiny(), Budget(30, 2, 8, kv_dtype=kind)
    cache = kvpolicies.FixedBudgetCache(model, "tova", budget)
    cache.allocate(1, torch.float32, torch.device("cpu"))
    assert cache.cache_bytes() == 2 * 2 * 30 * BYTES[kind]  # layers, heads, slots
    held = [t for g in cache.groups for t in (g.keys, g.values, g.positions, *g.scales)]
    assert sum(t.nbytes for t in held) == cache.cache_bytes()
    assert memory.predict(model, "tova", budget, 1, 40, 8).cache == cache.cache_bytes()
    assert run(prompts(40), "tova", kind)[0].cache_bytes == cache.cache_bytes()


def test_a_charge_is_in_slots_of_so_many_bits() -> None:
    one = Geometry(1, 2, 2, 30, 16, torch.float32, torch.device("cpu"))
    policy = resolve("snapkv(observe_window=4)")
    state = sum(t.nbytes for t in policy.init_state(one).values())
    for kind, size in BYTES.items():
        assert state_slots(policy, one, kind) == -(-state // (2 * size))


def test_full_is_stored_so_too() -> None:
    (out,) = kvpolicies.generate(tiny(), prompts(9), "full", "9:int8", max_new_tokens=4)
    assert out.cache_bytes == 2 * 2 * 13 * BYTES["int8"]


def test_eight_bits_move_predictions_less_than_four() -> None:
    rows, found = prompts(40, seed=5), {}
    for kind in KV_DTYPES:
        logits: list[torch.Tensor] = []
        kvpolicies.generate(
            tiny(), rows, "full", f"100%:{kind}", max_new_tokens=1,
            on_logits=lambda i, n, x, seen=logits: seen.append(x),
        )  # fmt: skip
        found[kind] = logits[0]
    off = {kind: float((found[kind] - found["auto"]).norm()) for kind in KINDS}
    assert 0 < off["bf16"] < off["int8"] < off["int4"] and off["int8"] < off["fp8"] < off["int4"]


def test_a_budget_says_what_it_is_stored_in(tmp_path: Any) -> None:
    assert BudgetSpec("0266:int8:pyramid").text == "266:int8:pyramid"
    spec = BudgetSpec("25%:int4:pyramid").of(400)
    assert spec == Budget(100, 4, 25, layers="pyramid", kv_dtype="int4")
    assert BudgetSpec("133", kv_dtype="fp8").of(None).kv_dtype == "fp8"
    assert BudgetSpec("133:auto", kv_dtype="fp8").of(None).kv_dtype == "auto"
    assert BudgetSpec("25%:int8").with_total(77) == "77:int8"
    assert Deployment(budget="133", kv_dtype="int8").budget_spec.of(None).kv_dtype == "int8"
    (out,) = run(prompts(40), "tova", "int8")
    out.trace.save(tmp_path / "t.safetensors")
    assert EvictionTrace.load(tmp_path / "t.safetensors").kv_dtype == "int8"


def test_what_cannot_be_stored_so_is_refused() -> None:
    with pytest.raises(UserError, match="kv_dtype must be one of auto, bf16, fp8, int8, int4"):
        Deployment(kv_dtype="int2")
    with pytest.raises(UserError, match="no way of sharing"):
        BudgetSpec("133:int2")
    with pytest.raises(UserError, match="pages inside vLLM"):
        check_budget(BudgetSpec("133:int8"), resolve("tova"))
