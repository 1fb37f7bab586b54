"""oracle: its scores against dense attention, what it keeps, and what it refuses."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicies
from kvpolicies import loop
from kvpolicies.adapter import LayerActivations, watched_dense
from kvpolicies.architecture import inspect_model
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.foresight import future_mass
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.policy import Geometry
from kvpolicies.recording import Future, record
from kvpolicies.registry import resolve
from kvpolicies.rope import Rope
from kvpolicies.step import LayerInput
from tests.kvpolicies.test_families import model_of
from tests.support.layer import OneLayer, process
from tests.support.models import padded, prompts, tiny

BUDGET = Budget(32, 2, 8)
DROP = 4  # an eighth of it
FORCED = prompts(60, seed=4)[0]


def attention(model: Any, tokens: list[int]) -> Tensor:
    """transformers' own weights, [layers, H, G, T, T]: in float64, but for mixtures of experts."""
    exact = copy.deepcopy(model)
    if not hasattr(model.config, "num_local_experts"):  # theirs are multiplied in float32 only
        exact.double()
    exact.set_attn_implementation("eager")
    with torch.no_grad():
        found = exact(torch.tensor([tokens]), output_attentions=True).attentions
    weights = torch.cat(found)
    heads = model.config.num_key_value_heads
    return weights.unflatten(1, (heads, weights.shape[1] // heads))


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma2, soft-capped", "gpt-oss, sinks", "phi3, partial rotation"]
)
def test_a_recording_gives_the_full_caches_attention(name: str) -> None:
    """In more than one block of queries, at every layer that attends to all."""
    model, (tokens,) = tiny() if name == "qwen3" else model_of(name), prompts(300)
    keys: dict[int, Tensor] = {}
    softmaxes: dict[int, LogitTransform] = {}

    def see(seen: LayerActivations) -> None:
        keys[seen.layer], softmaxes[seen.layer] = seen.keys[0], seen.softmax

    with torch.no_grad(), watched_dense(model, see):
        model(torch.tensor([tokens]))
    dense = attention(model, tokens)
    futures = record(model, tokens)
    spans = inspect_model(model).spans
    assert [future is None for future in futures] == [span is not None for span in spans]
    for layer, future in enumerate(futures):
        if future is None:
            continue
        assert future.lse.dtype == torch.float32
        for p in (0, 40, 298):
            mass = future_mass(
                future.queries[:, :, p + 1 :],
                future.lse[:, :, p + 1 :],
                keys[layer][:, : p + 1],
                softmaxes[layer],
            )
            expected = dense[layer, :, :, p + 1 :, : p + 1].sum(dim=2)
            assert (mass - expected).abs().max() < 2e-4


def test_nobody_to_come_gives_no_mass() -> None:
    queries, lse, keys = torch.zeros(2, 3, 0, 8), torch.zeros(2, 3, 0), torch.randn(2, 5, 8)
    assert torch.equal(future_mass(queries, lse, keys, LogitTransform(1.0)), torch.zeros(2, 3, 5))


def simulated(mass: Tensor, prompt: int) -> list[int]:
    """Eviction times of one head by the rule, from its group's attention [G, T, T] in float64."""
    length = mass.shape[-1]
    times, held = [1 << 30] * length, list(range(prompt))
    for new in range(prompt, length):
        if len(held) == BUDGET.total:
            score = mass[:, new:].sum(dim=1).amax(dim=0).tolist()
            free = [t for t in held if BUDGET.sinks <= t < new - BUDGET.window]
            for t in sorted(free, key=lambda t: (score[t], t))[:DROP]:
                times[t] = new
                held.remove(t)
        held.append(new)
    return times


def test_evictions_are_those_of_dense_attention_in_float64() -> None:
    """At layer 0, whose keys do not depend on what was evicted, all through the sequence."""
    model, (prompt,) = tiny(), prompts(20)
    (out,) = kvpolicies.generate(
        model, [prompt], "oracle", BUDGET, max_new_tokens=60, forced=[FORCED], trace=True
    )
    assert out.trace is not None and out.max_slots == BUDGET.total
    dense = attention(model, [*prompt, *FORCED][:-1])
    first = len(prompt) + 12  # the first eviction, before which no layer's keys have changed
    for layer, heads in enumerate(out.trace.times[0]):
        for head, times in enumerate(heads):
            expected = torch.tensor(simulated(dense[layer, head], len(prompt)))
            if layer == 0:
                assert torch.equal(times.clamp_max(79), expected.int().clamp_max(79))
                assert (times < 79).sum() > 40
            assert torch.equal(times == first, expected == first)
            assert (times == first).sum() == DROP


def test_it_keeps_what_the_future_needs_until_then() -> None:
    """Key 5 is never attended but by the query at 35."""
    length, dim = 48, 8
    keys = torch.zeros(1, 1, length, dim)
    keys[..., 5, 0] = 1
    queries = torch.zeros(1, 1, 1, length, dim)
    queries[..., 35, 0] = 50
    lse = torch.arange(1, length + 1).log()[None, None]
    lse[..., 35] = 50
    future = Future(queries[0], lse)
    geometry = Geometry(1, 1, 1, 16, dim, torch.float32, torch.device("cpu"))
    layer = OneLayer(geometry, resolve("oracle"), 0, Rope(None), length)
    layer.reset(0, Budget(16, 1, 4), 0, future)
    for t in range(length):
        here = slice(t, t + 1)
        new = keys[:, :, here]
        process(
            layer, LayerInput(queries[:, :, :, here], new, new, None, LogitTransform(1.0)), [0], [1]
        )
    assert layer.eviction_times is not None
    gone = layer.eviction_times[0, 0].tolist()
    assert all(gone[t] <= 35 for t in (1, 2, 3, 4, 6, 7, 8))
    assert 35 < gone[5] < length


def test_hybrid_models_are_evicted_in_their_full_layers() -> None:
    model = model_of("gpt-oss, sinks")
    (out,) = kvpolicies.generate(
        model, prompts(20), "oracle", BUDGET, max_new_tokens=60, forced=[FORCED], trace=True
    )
    assert out.trace is not None and out.max_slots == BUDGET.total
    logits = kvpolicies.replay(model, out.trace)
    assert logits[0, 19:].argmax(-1).tolist() == out.choices


def test_with_room_for_all_it_chooses_what_full_chose() -> None:
    rows = prompts(5, 30)
    for sampling in ({}, {"temperature": 0.9, "seed": 2}):
        kw: dict[str, Any] = {"max_new_tokens": 25, "eos_token_id": -1, **sampling}
        full = [g.tokens for g in kvpolicies.generate(tiny(), rows, "full", 99, **kw)]
        seen = kvpolicies.generate(tiny(), rows, "oracle", 64, forced=full, **kw)
        assert [g.choices for g in seen] == full
        tight = kvpolicies.generate(tiny(), rows, "oracle", 20, forced=full, **kw)
        assert [g.tokens for g in tight] == full and [g.choices for g in tight] != full


def test_a_ratio_is_one_of_what_was_asked_for_even_where_less_is_forced() -> None:
    (out,) = kvpolicies.generate(
        tiny(), prompts(30), "oracle", "50%", max_new_tokens=70, forced=[FORCED[:20]]
    )
    assert out.budget_total == 50 and len(out.tokens) == 20


def test_recordings_go_with_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: dict[int, weakref.ref] = {}

    def recorded(model: Any, tokens: list[int]) -> Any:
        futures = record(model, tokens)
        alive[tokens[0]] = weakref.ref(futures[0])
        return futures

    monkeypatch.setattr(loop, "record", recorded)
    rows = [[i, *prompt] for i, prompt in enumerate(prompts(5, 6, 7, 8))]

    def finished(index: int, _: Any) -> None:
        gc.collect()
        assert alive[index]() is None

    kvpolicies.generate(
        tiny(),
        rows,
        "oracle",
        20,
        max_new_tokens=[5, 40, 9, 30],
        batch_size=3,
        forced=[FORCED] * 4,
        on_finish=finished,
    )
    assert len(alive) == 4


def test_it_needs_forced_tokens() -> None:
    with pytest.raises(UserError, match=r"policy oracle looks ahead.*needs forced") as error:
        kvpolicies.generate(tiny(), prompts(5), "oracle", 64, max_new_tokens=3)
    assert "\n" not in str(error.value)


def test_under_transformers_own_loop_it_refuses_to_evict() -> None:
    model = tiny()
    ids, mask = padded(prompts(20))
    cache = kvpolicies.FixedBudgetCache(model, "oracle", BUDGET)
    with (
        pytest.raises(UserError, match="policy oracle looks ahead") as error,
        kvpolicies.attach(model, cache),
    ):
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            past_key_values=cache,
        )
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation != "kvpolicies"
