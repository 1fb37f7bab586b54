"""The decode loop against transformers' own, itself in other company, and replay."""

from typing import Any

import numpy as np
import pytest
import torch

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from tests.support.broken import Broken
from tests.support.futures import continuation
from tests.support.models import FAMILIES, padded, prompts, tiny
from tests.support.specs import (
    EVICTING,
    LOOKING_AHEAD,
    OWN_RULES,
    REPLAYABLE,
    SPECS,
    UNAIDED,
    UNTRACED,
)

BUDGET = Budget(32, 2, 8)
PROMPTS = prompts(5, 70, 17, 33, 1, 100)  # two are longer than the budget: prefilled in chunks
NEW = 40


def run(spec: str, model: Any = None, rows: list[list[int]] = PROMPTS, **kw: Any) -> list[Any]:
    kw = {"max_new_tokens": NEW, "eos_token_id": -1, "request_ids": [0] * len(rows), **kw}
    kw["trace"] = kw.get("trace", False) and spec not in UNTRACED
    if spec in LOOKING_AHEAD:
        kw.setdefault("forced", [continuation(row, NEW) for row in rows])
    return kvpolicies.generate(model or tiny(), rows, spec, kw.pop("budget", BUDGET), **kw)


def same(one: Any, other: Any) -> bool:
    """Tokens, and evictions where they are recorded."""
    traced = one.trace is None or torch.equal(one.trace.times, other.trace.times)
    return one.tokens == other.tokens and traced


def through_transformers(spec: str, model: Any, rows: list[list[int]], budget: Budget) -> Any:
    ids, mask = padded(rows)
    longest = ids.shape[1] + NEW
    trace = spec not in UNTRACED
    cache = kvpolicies.FixedBudgetCache(
        model, spec, budget, max_length=longest, trace=trace, request_ids=range(len(rows))
    )
    with kvpolicies.attach(model, cache):
        name = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **{name: cache},
        )
    return out[:, ids.shape[1] :].tolist(), cache


@pytest.mark.parametrize("family", FAMILIES)
def test_full_is_transformers_own_generation(family: str) -> None:
    model = tiny(family)
    ours = run("full", model, batch_size=4)
    for prompt, generation in zip(PROMPTS, ours, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert generation.tokens == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("spec", UNAIDED)
def test_both_ways_in_give_the_same_tokens_and_evictions(spec: str) -> None:
    budget = Budget(200, 0, 0) if spec == "full" else BUDGET
    ours = run(spec, trace=True, request_ids=range(len(PROMPTS)))
    theirs, cache = through_transformers(spec, tiny(), PROMPTS, budget)
    for row, generation in enumerate(ours):
        assert generation.tokens == theirs[row]
        if generation.trace is None:
            continue
        n = generation.trace.times.shape[-1]
        times = torch.stack([cache.groups[g].times(y, row, n) for g, y in cache.layer_index])
        assert torch.equal(times, generation.trace.times[0])


@pytest.mark.parametrize("spec", [*SPECS, *OWN_RULES])
def test_a_row_in_company_is_the_row_alone(spec: str) -> None:
    together = run(spec, trace=True)
    replaced = run(spec, trace=True, batch_size=2)  # rows are handed on to waiting prompts
    for i, prompt in enumerate(PROMPTS):
        (alone,) = run(spec, rows=[prompt], trace=True)
        for other in (together[i], replaced[i]):
            assert same(other, alone)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_that_stay_are_not_disturbed_by_rows_that_leave(spec: str) -> None:
    """Finished rows leave gaps, into which others move."""
    limits = [3, 40, 9, 25, 12, 33]
    together = run(spec, trace=True, max_new_tokens=limits)
    for i in (1, 3, 5):
        (alone,) = run(spec, rows=[PROMPTS[i]], trace=True, max_new_tokens=limits[i])
        assert same(together[i], alone)


@pytest.mark.parametrize("spec", [*SPECS, *OWN_RULES])
def test_rows_are_independent(spec: str) -> None:
    """Permuted, left out, joined by others, batched otherwise: a prompt's run is its own."""
    rng = np.random.default_rng(7)
    rows = prompts(33, 5, 70, 33, 70, 1, 33, seed=1)  # some as long as others: they share steps
    known = [run(spec, trace=True, rows=[row], max_new_tokens=24)[0] for row in rows]
    for _ in range(2):
        chosen = rng.permutation(len(rows))[: rng.integers(2, len(rows) + 1)].tolist()
        picked = [rows[i] for i in chosen]
        size = int(rng.integers(2, 7))
        out = run(spec, trace=True, rows=picked, batch_size=size, max_new_tokens=24)
        for i, generation in zip(chosen, out, strict=True):
            assert same(generation, known[i])


def test_what_a_papers_own_rule_holds() -> None:
    """SnapKV: budget + new tokens; RPC: prompt + growth + one period; R-KV: budget + buffer."""
    wanted = {
        "h2o(faithful=True)": lambda prompt: min(32, prompt + NEW - 1),
        "snapkv(observe_window=4, faithful=True)": lambda p: max(p, min(p, 32) + NEW - 1),
        "rkv(every=8, alpha=4, faithful=True)": lambda prompt: min(40, prompt + NEW - 1),
        # 39 tokens are fed after the prompt: compressed at 20 and at 36 of them.
        "rpc(observe_window=4, faithful=True, P=16, c=2)": lambda prompt: prompt + 8 + 16 + 4,
    }
    for spec, slots in wanted.items():
        for generation in run(spec, budget=Budget(32, 2, 8)):
            assert generation.max_slots == slots(generation.prompt_tokens), spec
            assert generation.max_slots <= generation.budget_total


@pytest.mark.parametrize("spec", [*REPLAYABLE, *OWN_RULES])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_replay(spec: str, family: str) -> None:
    if family == "llama" and spec not in ("beacon", "rkv", "h2o"):
        pytest.skip("one family is enough for the others")
    model = tiny(family)
    decoded: dict[tuple[int, int], torch.Tensor] = {}
    out = run(
        spec,
        model,
        trace=True,
        batch_size=2,
        on_logits=lambda r, step, row: decoded.__setitem__((r, step), row),
    )
    trace = kvpolicies.EvictionTrace.stack([g.trace for g in out])
    logits = kvpolicies.replay(model, trace)
    for (r, step), row in decoded.items():
        assert (logits[r, len(PROMPTS[r]) - 1 + step] - row).abs().max() <= 1e-4


@pytest.mark.parametrize("spec", [s for s in EVICTING if s not in UNTRACED])
def test_evictions_do_happen(spec: str) -> None:
    """So that the tests above compare something."""
    for generation in run(spec, trace=True):
        gone = (generation.trace.times < generation.trace.times.shape[-1]).sum(-1)
        assert (gone > 0).all() == (generation.prompt_tokens + NEW - 1 > BUDGET.total)
        assert generation.max_slots <= BUDGET.total


def test_state_does_not_pass_from_one_prompt_to_the_next() -> None:
    for spec in ("random", "h2o", "rkv", "beacon", "streaming(positions='cache')"):
        fresh = run(spec, rows=[PROMPTS[3]])[0].tokens
        after_others = run(spec, rows=[PROMPTS[1], PROMPTS[5], PROMPTS[3]], batch_size=1)[2].tokens
        assert after_others == fresh, spec


def test_a_cache_that_is_reset_is_new() -> None:
    model = tiny()
    ids, mask = padded([PROMPTS[1]])
    cache = kvpolicies.FixedBudgetCache(model, "beacon", BUDGET)
    outs = []
    with kvpolicies.attach(model, cache):
        for _ in range(2):
            cache.reset()
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                past_key_values=cache,
            )
            outs.append(out[0].tolist())
    assert outs[0] == outs[1]


def test_prompts_are_cut_where_the_budget_says_however_they_arrive() -> None:
    """One forward with the whole prompt, or one a chunk: the same evictions."""
    one, _ = through_transformers("beacon", tiny(), [PROMPTS[5]], BUDGET)
    assert run("beacon", rows=[PROMPTS[5]])[0].tokens == one[0]


def test_sampling_belongs_to_the_request() -> None:
    kw = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "request_ids": range(6), "seed": 3}
    together = run("snapkv", **kw)
    for i in (1, 4):
        (alone,) = run("snapkv", rows=[PROMPTS[i]], **{**kw, "request_ids": [i]})
        assert alone.tokens == together[i].tokens
    assert [g.tokens for g in run("snapkv", **{**kw, "batch_size": 2})] == [
        g.tokens for g in together
    ]
    assert run("snapkv", **{**kw, "seed": 4})[0].tokens != together[0].tokens


def test_sampling_follows_the_distribution() -> None:
    from kvpolicies.sampling import Sampling, choose

    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    sampling = Sampling(temperature=1.0)
    randoms = [sampling.generator(i) for i in range(4000)]
    drawn = choose(logits.expand(4000, 4), sampling.processors(), False, randoms)
    share = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    assert torch.allclose(share, logits.exp(), atol=0.03)


def test_stops_at_a_stop_token_and_hands_the_row_on() -> None:
    tokens = run("streaming", rows=[PROMPTS[2]])[0].tokens
    stop = tokens[10]
    first = tokens.index(stop) + 1
    out = run("streaming", rows=[PROMPTS[2]] * 3, eos_token_id=[stop, -7], batch_size=1)
    assert [(g.tokens, g.finish) for g in out] == [(tokens[:first], "stop")] * 3


def test_each_prompt_has_its_own_limit() -> None:
    out = run("streaming", max_new_tokens=[1, 2, 3, 4, 5, 6])
    assert [len(g.tokens) for g in out] == [1, 2, 3, 4, 5, 6]


def test_teacher_forcing_feeds_what_it_is_given() -> None:
    forced = prompts(40, 40, seed=9)
    steps: list[tuple[int, int]] = []
    out = run(
        "h2o",
        rows=PROMPTS[:2],
        forced=forced,
        on_logits=lambda r, step, row: steps.append((r, step)),
    )
    assert [g.tokens for g in out] == forced
    assert sorted(steps) == [(r, s) for r in range(2) for s in range(40)]


def test_a_ratio_is_taken_of_each_prompt() -> None:
    out = run("snapkv", budget="50%", rows=[PROMPTS[1], PROMPTS[2]])
    assert [g.budget_total for g in out] == [55, 29]
    assert all(g.max_slots == g.budget_total for g in out)


def test_shares_of_time_sum_to_no_more_than_the_wall_clock() -> None:
    import time

    begin = time.perf_counter()
    out = run("streaming", batch_size=2)
    assert 0 < sum(g.seconds for g in out) <= time.perf_counter() - begin


def test_the_model_is_left_as_it_was() -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    model.train()
    with pytest.raises(UserError):
        run("beacon", model, rows=[[]])
    run("beacon", model, rows=[PROMPTS[0]])
    assert model.training and model.config._attn_implementation == before
    model.eval()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [[5], []]}, "prompt 1 has no tokens"),
        ({"budget": 10**9, "max_new_tokens": 0}, "max_new_tokens"),
        ({"budget": "lots"}, "budget 'lots'"),
        ({"budget": 5, "rows": [[5]]}, "no slot to choose"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"request_ids": [1]}, "request_ids"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -1}, "batch_size"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"rows": ["text"]}, "token ids"),
        ({"rows": [5, 6]}, "token ids"),
        ({"forced": [[]] * len(PROMPTS)}, "no tokens"),
        ({"max_new_tokens": [1, 2]}, "max_new_tokens"),
    ],
)
def test_bad_input_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        run("beacon", **change)
    assert "\n" not in str(error.value)


def test_nan_in_a_score_is_refused() -> None:
    with pytest.raises(UserError, match="NaN in a score at layer 0"):
        run(Broken(), rows=[PROMPTS[1]])  # type: ignore[arg-type]
