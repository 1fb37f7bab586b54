"""A row's evictions follow from its tokens and from which of them are prompt, and nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.policy import Schedule
from kvpolicies.rows import Counts, Rows
from tests.support.models import padded, prompts, tiny
from tests.support.specs import UNAIDED, UNTRACED

BUDGET = Budget(32, 2, 8)
PROMPTS = prompts(75, 43)
NEW = 4
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SPECS = [s for s in UNAIDED if s != "full" and s not in UNTRACED]


def cache_of(spec: str, **options: Any) -> kvpolicies.FixedBudgetCache:
    return kvpolicies.FixedBudgetCache(tiny(), spec, BUDGET, max_length=100, trace=True, **options)


def times(cache: kvpolicies.FixedBudgetCache) -> Tensor:
    """Eviction times [layers, B, H, T]."""
    return torch.stack([cache.groups[g].eviction_times[y] for g, y in cache.layer_index])  # type: ignore[index]


def generated(cache: kvpolicies.FixedBudgetCache, rows: list[list[int]], **options: Any) -> Tensor:
    ids, mask = padded(rows)
    with kvpolicies.attach(tiny(), cache):
        out = tiny().generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW,
            **{**OPTIONS, **options},
        )  # fmt: skip
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("spec", SPECS)
def test_the_callers_chunks_change_nothing(spec: str) -> None:
    whole = cache_of(spec)
    expected = generated(whole, PROMPTS)
    for size in (7, 32, 74):  # 74: the last chunk is one column wide
        chunked = cache_of(spec)
        assert torch.equal(generated(chunked, PROMPTS, prefill_chunk_size=size), expected)
        assert torch.equal(times(chunked), times(whole))


@pytest.mark.parametrize("spec", ["streaming", "beacon", "snapkv", "h2o", "keydiff"])
def test_a_prompt_by_single_tokens_is_the_prompt(spec: str) -> None:
    whole, chunked = cache_of(spec), cache_of(spec)
    expected = generated(whole, PROMPTS)
    assert torch.equal(generated(chunked, PROMPTS, prefill_chunk_size=1), expected)
    assert torch.equal(times(chunked), times(whole))
    assert chunked.evicting.rows.seen == [75 + NEW - 1, 43 + NEW - 1]


@pytest.mark.parametrize("spec", ["streaming", "snapkv", "beacon", "rkv"])
def test_a_loop_of_ones_own_may_cut_a_prompt_anywhere(spec: str) -> None:
    """Nobody says where the prompt ends: what must be seen whole is held back till it is known."""
    (prompt,) = prompts(75)
    runs = []
    for cuts in ([0, 75], [0, 20, 50, 75], [0, 32, 45, 75], [0, 9, 73, 75]):
        cache, tokens = cache_of(spec), []
        with torch.no_grad(), kvpolicies.attach(tiny(), cache):
            for a, b in pairwise(cuts):
                logits = tiny()(torch.tensor([prompt[a:b]]), past_key_values=cache).logits
            for _ in range(NEW):
                tokens.append(int(logits[0, -1].argmax()))
                logits = tiny()(torch.tensor([tokens[-1:]]), past_key_values=cache).logits
        runs.append((tokens, times(cache).tolist()))
    assert all(run == runs[0] for run in runs[1:])


@pytest.mark.parametrize("spec", ["streaming", "snapkv", "beacon"])
def test_a_second_turn_is_more_of_the_prompt(spec: str) -> None:
    """Whether a prompt comes in one call of generate or in two, each with all of it so far."""
    (prompt,) = prompts(75)
    once, twice = cache_of(spec), cache_of(spec)
    expected = generated(once, [prompt])
    with kvpolicies.attach(tiny(), twice):
        # One new token is chosen and never fed, so the prompt may go on otherwise.
        tiny().generate(
            torch.tensor([prompt[:50]]), past_key_values=twice, max_new_tokens=1, **OPTIONS
        )
    assert torch.equal(generated(twice, [prompt]), expected)
    assert torch.equal(times(twice), times(once))


def test_padding_never_becomes_a_token() -> None:
    ids = torch.tensor([[0, 0, 0, 5], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]])
    for size in (1, 3, None):
        cache = cache_of("streaming")
        with kvpolicies.attach(tiny(), cache):
            tiny().generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1,
                prefill_chunk_size=size, **OPTIONS,
            )  # fmt: skip
        assert cache.evicting.rows.seen == [1, 4]
        held = cache.groups[0].positions[0, :, 0, :5].tolist()
        assert held == [[0, -1, -1, -1, -1], [0, 1, 2, 3, -1]]
    # A loop of one's own, by single columns.
    cache = cache_of("streaming")
    with torch.no_grad(), kvpolicies.attach(tiny(), cache):
        for i in range(4):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, i : i + 1]
            tiny()(
                ids[:, i : i + 1], attention_mask=mask[:, : i + 1], position_ids=positions,
                past_key_values=cache,
            )  # fmt: skip
    assert cache.evicting.rows.seen == [1, 4]


def test_a_budget_belongs_to_a_prompt_and_its_copies() -> None:
    budgets = [Budget(24, 2, 8), Budget(32, 2, 8)]
    cache = kvpolicies.FixedBudgetCache(tiny(), "streaming", budgets, request_ids=[7, 9])
    generated(cache, PROMPTS, num_return_sequences=2, do_sample=True)
    rows = cache.evicting.rows
    assert [rows.schedule(i).capacity for i in range(4)] == [24, 24, 32, 32]
    assert rows.seeds == [7, 7, 9, 9]
    cache = kvpolicies.FixedBudgetCache(tiny(), "streaming", budgets)
    with pytest.raises(UserError, match="2 budgets given for a batch of 3"):
        generated(cache, prompts(5, 6, 7))
    cache = kvpolicies.FixedBudgetCache(tiny(), "random", BUDGET, request_ids=[1, 2])
    with pytest.raises(UserError, match="2 request_ids given for a batch of 3"):
        generated(cache, prompts(5, 6, 7))


def test_random_numbers_follow_from_the_request_and_not_from_the_row() -> None:
    alone, second = cache_of("random"), cache_of("random")
    (one,) = generated(alone, [PROMPTS[0]])
    two = generated(second, [PROMPTS[1], PROMPTS[0]])
    assert torch.equal(two[1], one) and torch.equal(times(second)[:, 1], times(alone)[:, 0])
    other = cache_of("random", request_ids=[5])
    generated(other, [PROMPTS[0]])
    assert not torch.equal(times(other), times(alone))


def test_a_plan_is_made_of_counts_alone() -> None:
    rows = Rows(3)
    for row in range(3):
        rows.reset(row, Schedule.under(BUDGET, drop=4), seed=0)
    counts = Counts([0, 1, 2], [40, 40, 1], [True, True, False], [True, True, True])
    moves = rows.plan(counts)
    assert [(m.rows, m.n, m.first) for m in moves] == [
        (slice(0, 2), 32, True), (slice(2, 3), 1, True), (slice(0, 2), 8, False),
    ]  # fmt: skip
    # topk 22: eleven go when a token of the prompt needs a slot, though eight remain.
    assert moves[2].drops == [11, 11] and moves[2].before == [21, 21]
    assert rows.lengths == [0, 0, 0], "nothing is counted before the forward is through"
    rows.commit(moves)
    assert rows.lengths == [29, 29, 1] and rows.seen == [40, 40, 1] and rows.peak == [32, 32, 1]
    assert rows.prompts == [40, 40, 0]
    rows.commit(rows.plan(Counts([0], [3], [False], [True])))
    (move,) = rows.plan(Counts([0], [1], [False], [True]))
    assert move.drops == [4] and move.prompts == [40]


def test_a_schedule_that_grows() -> None:
    schedule = Schedule(60, drop=8, first=20, growth=4)
    assert [schedule.full_at(evicted) for evicted in (0, 7, 8, 16, 800)] == [20, 20, 24, 28, 60]
    assert Schedule(60, drop=8).full_at(80) == 60
    # The window gives way where else nothing could go, the sinks do not.
    assert Schedule.under(Budget(10, 2, 3), 4, window=32).window_beside(10, 4) == 4
