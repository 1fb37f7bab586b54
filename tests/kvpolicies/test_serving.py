"""The decode loop with requests that come and go: each is still what `generate` makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvpolicies
from kvpolicies import loop
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.loop import Event
from kvpolicies.sampling import Sampling, choose, choose_each
from kvpolicies.serving import Engine, serving
from tests.support.models import prompts, tiny
from tests.support.reading import Reading
from tests.support.specs import OWN_RULES, UNAIDED

BUDGET = Budget(32, 2, 8)
PROMPTS = prompts(5, 70, 17, 33, 1, 100, 40)
GREEDY = Sampling()
LENGTH = 128


def alone(spec: str, prompt: list[int], new: int, budget: Any = BUDGET, **options: Any) -> Any:
    (out,) = kvpolicies.generate(
        tiny(), [prompt], spec, budget, max_new_tokens=new, eos_token_id=-1, **options
    )
    return out


def started(spec: str = "streaming", rows: int = 3, budget: Any = BUDGET, **options: Any) -> Any:
    return serving(tiny(), spec, budget, rows=rows, max_length=LENGTH, eos_token_id=-1, **options)


def add(engine: Engine, index: int, new: int = 20, sampling: Sampling = GREEDY) -> Any:
    request = engine.request(index, PROMPTS[index], new, sampling)
    engine.loop.add(request)
    return request


def run_out(engine: Engine, events: list[Event]) -> None:
    while engine.loop.busy:
        events.extend(engine.loop.advance())


def told(events: list[Event], index: int) -> tuple[list[int], list[str | None]]:
    """All tokens that events told of, and how they said that it ended."""
    own = [event for event in events if event.index == index]
    return [t for event in own for t in event.tokens], [e.finish for e in own if e.finish]


FIXED = ("streaming", "beacon", "h2o", "lazy", "full")


@pytest.mark.parametrize(
    ("spec", "step", "look"),
    [(spec, "eager", 1) for spec in (*UNAIDED, *OWN_RULES)] + [(s, "fixed", 8) for s in FIXED],
)
def test_who_comes_later_and_who_leaves_change_nothing(
    spec: str, step: str, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loop.SYNC_EVERY, "cpu", look)
    events: list[Event] = []
    with started(spec, step=step) as engine, torch.no_grad():
        for index in (0, 1, 2):
            add(engine, index)
        gone = add(engine, 3)  # waits
        events.extend(engine.loop.advance())
        gone.cancelled = engine.loop.active[0].cancelled = True
        for index in (4, 5, 6):
            add(engine, index)
        run_out(engine, events)
        assert engine.loop.free == [0, 1, 2] and not engine.loop.active
    assert told(events, 0)[1] == ["cancelled"] and told(events, 3) == ([], ["cancelled"])
    for index in (1, 4, 5):  # in company from its start, a single token, more than its budget
        expected = alone(spec, PROMPTS[index], 20)
        assert told(events, index) == (expected.tokens, ["length"])
        (done,) = [e.generation for e in events if e.index == index and e.generation]
        assert done.tokens == expected.tokens and done.max_slots == expected.max_slots
        assert done.budget_total == expected.budget_total
    cut = told(events, 0)[0]
    assert cut == alone(spec, PROMPTS[0], 20).tokens[: len(cut)] and 0 < len(cut) < 20


def test_each_token_is_told_as_it_comes() -> None:
    with started() as engine, torch.no_grad():
        add(engine, 0, 4)
        turns = []
        while engine.loop.busy:
            turns.append([len(event.tokens) for event in engine.loop.advance()])
    assert turns == [[1, 1], [1], [1]]


def test_prefill_ends_within_a_chunk_of_the_cancellation() -> None:
    with started() as engine, torch.no_grad():
        request = add(engine, 5)  # 100 tokens, a third of them at once
        chunks, advance = [], engine.loop._advance

        def watched(requests: list[Any], counts: list[int]) -> None:
            advance(requests, counts)
            chunks.append(counts)
            request.cancelled = True

        engine.loop._advance = watched  # type: ignore[method-assign]
        assert list(engine.loop.advance()) == [Event(5, [], "cancelled")]
        assert len(chunks) == 1 and not engine.loop.busy and engine.loop.free == [0, 1, 2]


def test_short_requests_without_end_do_not_starve_a_long_one() -> None:
    with started(rows=2) as engine, torch.no_grad():
        long = add(engine, 0, 20)
        for turn in range(1, 20):
            engine.loop.add(engine.request(100 + turn, PROMPTS[2], 1, GREEDY))
            engine.loop.add(engine.request(200 + turn, PROMPTS[2], 1, GREEDY))
            list(engine.loop.advance())
        assert len(long.tokens) == 20


def test_ratio_budgets_are_each_requests_own() -> None:
    events: list[Event] = []
    with started("snapkv", budget="50%") as engine, torch.no_grad():
        add(engine, 1)
        add(engine, 2, 40)
        run_out(engine, events)
        assert engine.loop.cache.slots == LENGTH // 2
    assert told(events, 1)[0] == alone("snapkv", PROMPTS[1], 20, "50%").tokens
    assert told(events, 2)[0] == alone("snapkv", PROMPTS[2], 40, "50%").tokens


def test_full_holds_every_token_up_to_the_longest() -> None:
    events: list[Event] = []
    with started("full") as engine, torch.no_grad():
        add(engine, 5, LENGTH - 100)
        run_out(engine, events)
    assert told(events, 5)[0] == alone("full", PROMPTS[5], LENGTH - 100).tokens


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="looks ahead"), started("oracle"):
        pass
    with pytest.raises(UserError, match="rows"), started(rows=0):
        pass
    with started() as engine:
        for prompt, new, message in (([], 1, "no tokens"), ([1] * 120, 9, "max_length"),
                                     ([1], 0, "max_new_tokens")):  # fmt: skip
            with pytest.raises(UserError, match=message):
                engine.request(0, prompt, new, GREEDY)


def test_each_row_has_its_own_sampling() -> None:
    kinds = [GREEDY, Sampling(0.7, 0.9, 0, 1), Sampling(1.5, 1.0, 5, 2), Sampling(0.7, 0.9, 0, 3),
             Sampling(0.0, 0.5), Sampling(1.0, seed=4)]  # fmt: skip
    events: list[Event] = []
    with started("snapkv", rows=6) as engine, torch.no_grad():
        for index, kind in enumerate(kinds):
            add(engine, index, sampling=kind)
        run_out(engine, events)
    for index, kind in enumerate(kinds):
        own = alone(
            "snapkv", PROMPTS[index], 20, temperature=kind.temperature, top_p=kind.top_p,
            top_k=kind.top_k, seed=kind.seed,
        )  # fmt: skip
        assert told(events, index)[0] == own.tokens


def test_choosing_row_by_row_reads_nothing_back_and_mixes_no_rows() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    kinds = [
        Sampling(t, p) for t, p in [(0, 1), (1, 0.5), (0, 1), (1, 0.5), (2, 1), (0, 1), (1, 1)]
    ]
    randoms = [np.random.default_rng(i) for i in range(7)]
    with Reading() as reading:
        chosen = choose_each(logits, kinds, randoms)
    assert reading.seen == []
    for row, kind in enumerate(kinds):
        own = [np.random.default_rng(row)]
        one = choose(logits[row : row + 1], kind.processors(), kind.temperature == 0, own)
        assert chosen[row] == one[0]


def test_a_number_next_to_one_still_draws_a_token() -> None:
    class Highest:
        def random(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    for t in (0.5, 1.0, 2.0):
        chosen = choose(logits, Sampling(t).processors(), False, [Highest()])  # type: ignore
        assert 0 <= int(chosen) < 1000
