"""The learned policies in the cache: the scores of the training form, each token's own, once."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.retention import retain
from kvpolicies.learned.places import Places
from kvpolicies.learned.policy import Learned
from kvpolicies.policy import Geometry
from kvpolicies.registry import resolve
from kvpolicies.slots import SlotGroup
from kvpolicies.step import LayerInput
from tests.kvpolicies.test_cache import check, plain_rope
from tests.support.layer import OneLayer, process
from tests.support.models import prompts, tiny
from tests.support.reading import Reading
from tests.support.scorers import WINDOW
from tests.support.specs import LEARNED

H, G, D, E = 2, 2, 16, 64  # the tiny model's
BUDGET = Budget(32, 2, WINDOW)
FIELDS = ("queries", "keys", "values", "hidden")
STATIC = [s for s in LEARNED if "trimkv" not in s]


def layer_of(spec: str, budgets: list[Budget], dtype: torch.dtype = torch.float32) -> OneLayer:
    slots = max(b.total for b in budgets)
    geometry = Geometry(len(budgets), H, G, slots, D, dtype, torch.device("cpu"), 400)
    layer = OneLayer(geometry, resolve(spec), 1, plain_rope(D), 400)
    for row, budget in enumerate(budgets):
        layer.reset(row, budget, row)
    return layer


def draw(rows: int, n: int, seed: int = 0) -> LayerInput:
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, rows, H, n, D, generator=g)
    inputs = torch.randn(rows, n, E, generator=g)
    return LayerInput(
        torch.randn(rows, H, G, n, D, generator=g), k, v, inputs, LogitTransform(0.25)
    )


def changed(tokens: LayerInput, how: Callable[[Tensor], Tensor]) -> LayerInput:
    return replace(tokens, **{name: how(getattr(tokens, name)) for name in FIELDS})


def feed(layer: OneLayer, tokens: LayerInput, pieces: list[int]) -> None:
    """Row i of the tokens into row i of the layer, in pieces."""
    first, rows = 0, tokens.keys.shape[0]
    for n in pieces:
        part = tokens.part(slice(0, rows), slice(first, first + n))
        process(layer, part, range(rows), [n] * rows)
        first += n


def priorities(layer: OneLayer, tokens: LayerInput) -> Tensor:
    """What the training form says of every token, [B, H, S]: score + lam t."""
    policy = layer.policy
    assert isinstance(policy, Learned)
    scorer = policy.network(torch.device("cpu"))
    keys, s = tokens.keys, tokens.keys.shape[2]
    positions = torch.arange(s)
    if policy.config.features == "pre_rope":
        layer.rope.prepare(s, keys.device)
        keys = layer.rope.unrotate(keys, positions[None].expand(keys.shape[0], s))
    assert tokens.hidden is not None
    inputs = tokens.hidden.to(scorer.dtype)
    r = scorer.scores(1, keys, tokens.values, inputs)
    return (r + scorer.age(1)[:, None] * positions).float()


def held(layer: OneLayer, row: int) -> tuple[Tensor, Tensor]:
    """(positions, scores) [H, n] of a row's tokens that have a score."""
    n, policy = layer.lengths[row], layer.policy
    assert isinstance(policy, Learned)
    positions, order = layer.positions[row, :, :n].long().sort(-1)
    scores = layer.slot_state["score"][row, :, :n].gather(-1, order)
    old = n - policy.config.lag - layer.seen[row] % getattr(policy, "block", 1)
    assert (scores[:, old:] == 0).all(), "scored before its time"
    return positions[:, :old], scores[:, :old]


@pytest.mark.parametrize("spec", LEARNED)
def test_slots_hold_the_scores_of_the_training_form(spec: str) -> None:
    """Rows of unequal budgets, hence lengths; prompts whole, in pieces, token by token."""
    tokens, budgets = draw(3, 150), [BUDGET, Budget(41, 3, 9), Budget(20, 0, WINDOW)]
    for pieces in ([150], [1] * 150, [100, *[1] * 50], [30, 1, 1, 20, 60, 38]):
        layer = layer_of(spec, budgets)
        feed(layer, tokens, pieces)
        expected = priorities(layer, tokens)
        for row in range(3):
            positions, scores = held(layer, row)
            wanted = expected[row].gather(-1, positions)
            assert (scores - wanted).abs().max() <= 1e-5 * max(1, float(wanted.abs().max()))
        assert expected[..., :-WINDOW].std() > 0.3, "nothing to choose"


@pytest.mark.parametrize("spec", [s for s in STATIC if "every" not in s])
def test_one_in_one_out_is_what_training_retains(spec: str) -> None:
    """Attend-then-evict: the window is one longer and the top k one less (see `retain`)."""
    tokens = draw(2, 150)
    layer = layer_of(spec, [BUDGET] * 2)
    feed(layer, tokens, [1] * 150)
    sizes = (BUDGET.sinks, BUDGET.window + 1, BUDGET.topk - 1)
    expires = retain(priorities(layer, tokens).flatten(0, 1), *sizes)[1]
    assert layer.eviction_times is not None
    assert torch.equal(layer.eviction_times[..., :150].flatten(0, 1), expires)
    assert (expires < 150).any()


@pytest.mark.parametrize("spec", STATIC)
def test_prompts_in_pieces_keep_the_best_of_all(spec: str) -> None:
    """However many go at once, none of the best that then stay: their scores are the same."""
    tokens = draw(1, 120)
    for pieces in ([120], [1] * 120, [50, 70]):
        layer = layer_of(spec, [BUDGET])
        feed(layer, tokens, pieces)
        expected = priorities(layer, tokens)[0, :, 2 : 120 - WINDOW]
        best = expected.topk(BUDGET.topk - BUDGET.chunk).indices + 2
        for head in range(H):
            assert set(best[head].tolist()) <= set(layer.positions[0, head].tolist())


@pytest.mark.parametrize("spec", LEARNED)
def test_a_prompt_in_forwards_of_its_own_steps_is_the_whole_prompt(spec: str) -> None:
    tokens = draw(1, 120)
    whole, stepped = layer_of(spec, [BUDGET]), layer_of(spec, [BUDGET])
    feed(whole, tokens, [120])
    done = 0
    while done < 120:
        n = min(120 - done, stepped.group.rows.room(0, prompt=True)[1])
        process(stepped, tokens.part(slice(0, 1), slice(done, done + n)), [0], [n])
        done += n
    assert whole.eviction_times is not None and stepped.eviction_times is not None
    assert torch.equal(whole.eviction_times, stepped.eviction_times)
    for name, tensor in whole.state.items():
        assert torch.equal(tensor, stepped.state[name])


def test_trimkv_weighs_the_log_of_its_gate_with_the_age() -> None:
    layer, tokens = layer_of("trimkv(scorer='random/trimkv')", [BUDGET] * 2), draw(2, 31)
    feed(layer, tokens, [31])
    expected = priorities(layer, tokens)
    view = layer.view(slice(0, 2))
    age = 30 - torch.arange(31)
    ours = layer.policy.scores(view).gather(-1, view.positions.long().argsort(-1))
    assert (ours - age * expected).abs().max() <= 1e-5
    assert layer.policy.schedule(Budget(4096), 0, 0).drop == 128
    assert layer.policy.schedule(Budget(64, 4, 8), 0, 0).drop == 8


@pytest.mark.parametrize("spec", LEARNED)
def test_rows_and_requests_do_not_see_each_other(spec: str) -> None:
    tokens, others = draw(2, 90), draw(2, 90, seed=5)
    pieces = [60, *[1] * 30]
    alone = layer_of(spec, [BUDGET])
    feed(alone, tokens.part(slice(0, 1), slice(0, 90)), pieces)
    for company in (tokens, others):
        mixed = changed(company, lambda x: x.clone())
        for name in FIELDS:
            getattr(mixed, name)[0] = getattr(tokens, name)[0]
        layer = layer_of(spec, [BUDGET] * 2)
        feed(layer, others, [70, *[1] * 20])  # the rows' previous requests
        for row in range(2):
            layer.reset(row, BUDGET, row)
        feed(layer, mixed, pieces)
        assert layer.eviction_times is not None and alone.eviction_times is not None
        assert torch.equal(layer.eviction_times[0], alone.eviction_times[0])
        for name, tensor in layer.state.items():
            torch.testing.assert_close(tensor[:1], alone.state[name], rtol=1e-5, atol=1e-5)
        layer.group.move_row(0, 1)
        assert all(torch.equal(t[0], t[1]) for t in layer.state.values())


@pytest.mark.parametrize("spec", LEARNED)
def test_invariants_and_no_waiting_for_the_device(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tests/kvpolicies/test_cache.py does for policies that take any sizes."""

    monkeypatch.setattr(SlotGroup, "check_scores", lambda self: None)
    budgets = [Budget(40, 2, 8), Budget(32, 3, 12)]
    layer, tokens = layer_of(spec, budgets), draw(2, 120)
    reading = Reading()
    first = 0
    for n in [20, 30, 1, 5] + [1] * 40:
        with reading:
            process(layer, tokens.part(slice(0, 2), slice(first, first + n)), [0, 1], [n, n])
        first += n
        check(layer, budgets, True)
    assert layer.peak == [40, 32]
    assert reading.seen == []


@pytest.mark.parametrize("spec", LEARNED)
def test_a_bf16_cache_is_scored_as_float32_of_the_same_numbers(spec: str) -> None:
    narrow = changed(draw(1, 90), lambda x: x.bfloat16())
    wide = changed(narrow, lambda x: x.float())
    times = []
    for dtype, tokens in ((torch.float32, wide), (torch.bfloat16, narrow)):
        layer = layer_of(spec, [BUDGET], dtype)
        feed(layer, tokens, [60, *[1] * 30])
        times.append(layer.eviction_times)
    assert torch.equal(times[0], times[1])


@pytest.mark.parametrize("spec", LEARNED)
def test_evictions_happen_within_the_budget(spec: str) -> None:
    for out in kvpolicies.generate(
        tiny(), prompts(5, 70, 33), spec, BUDGET, max_new_tokens=40, eos_token_id=-1, trace=True
    ):
        assert out.max_slots == 32 and out.trace is not None
        gone = (out.trace.times < out.trace.times.shape[-1]).sum(-1)
        assert (gone > 0).all()
        assert not torch.equal(out.trace.times[0, 0, 0], out.trace.times[0, 0, 1]), "heads differ"


def test_bytes_of_the_state() -> None:
    """A matrix, a vector and a number a head, float32, and a float32 score a slot."""
    sizes = {"kvpop": 4 * H * (12 * 12 + 12 + 1), "kvpop_mlp": 0, "dms": 0, "trimkv": 0}
    for name, state in sizes.items():
        cache = kvpolicies.FixedBudgetCache(tiny(), f"{name}(scorer='random/{name}')", BUDGET)
        for device in ("meta", "cpu"):
            cache.allocate(3, torch.bfloat16, torch.device(device))
            assert cache.state_bytes() == 2 * (state + 4 * H * BUDGET.total)


def test_a_window_shorter_than_the_scorers_is_refused() -> None:
    short, spec = Budget(32, 2, 7), "kvpop(scorer='random/kvpop')"
    calls = [
        lambda: resolve(spec).schedule(short, 10, 10),
        lambda: kvpolicies.generate(tiny(), [[5]], spec, short, max_new_tokens=4),
        lambda: feed(layer_of(spec, [short]), draw(1, 5), [5]),  # whoever runs the loop
        lambda: resolve("dms(scorer='random/dms')").schedule(Budget(32, 2, 0), 10, 10),
    ]
    for call, numbers in zip(calls, [("8", "7")] * 3 + [("1", "0")], strict=True):
        with pytest.raises(UserError, match=f"{numbers[0]} tokens after .* {numbers[1]} is") as e:
            call()
        assert "\n" not in str(e.value)
    for name in ("kvpop_at_entry", "kvpop_mlp", "trimkv"):
        policy = resolve(f"{name.removesuffix('_at_entry')}(scorer='random/{name}')")
        assert policy.schedule(Budget(32, 2, 0), 10, 10).window == 0


@pytest.mark.parametrize("n", [1, 3])
def test_places_are_those_of_positions_0_and_more(n: int) -> None:
    """LayerInput that are nowhere are in no empty slot either."""
    filled = torch.tensor([[[4, 0, 3, 1, 2], [0, 1, 4, 3, 2]]], dtype=torch.int32)
    empty = torch.full((1, 2, 2), -1, dtype=torch.int32)
    held = torch.cat([filled, empty], dim=-1)
    for first in range(-n, 5 - n + 1):
        places = Places(held, torch.arange(first, first + n)[None])
        stored, values = torch.zeros(1, 2, 7), torch.arange(1.0, n + 1).expand(1, 2, n)
        places.write(stored, values)
        wanted = (held - first + 1).float() * ((held >= max(first, 0)) & (held < first + n))
        assert torch.equal(stored, wanted)
        for i in range(max(0, -first), n):
            assert (held.gather(2, places.slots())[..., i] == first + i).all()
