"""Prompts that come in by turns with the tokens of others: nobody's tokens change by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies import loop
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.loop import Event
from kvpolicies.sampling import Sampling
from kvpolicies.serving import serving
from tests.support.models import prompts, tiny
from tests.support.specs import OWN_RULES, UNAIDED

BUDGET = Budget(32, 2, 8)
PROMPTS = prompts(5, 9, 100, 70, 3)
CHUNK, NEW = 8, 12


def started(spec: str = "streaming", **options: Any) -> Any:
    return serving(
        tiny(), spec, BUDGET, rows=3, max_length=128, eos_token_id=-1, prefill_chunk=CHUNK,
        **options,
    )  # fmt: skip


def add(engine: Any, index: int, new: int = NEW) -> Any:
    request = engine.request(index, PROMPTS[index], new, Sampling())
    engine.loop.add(request)
    return request


def tokens(events: list[Event], index: int) -> list[int]:
    return [token for event in events if event.index == index for token in event.tokens]


def watch(engine: Any) -> list[tuple[list[int], list[int]]]:
    """(indices, counts) of each forward that brings prompt tokens, as they happen."""
    seen: list[tuple[list[int], list[int]]] = []
    advance = engine.loop._advance

    def watched(requests: list[Any], counts: list[int]) -> None:
        seen.append(([r.index for r in requests], counts))
        advance(requests, counts)

    engine.loop._advance = watched
    return seen


FIXED = ("streaming", "beacon", "h2o", "full")


@pytest.mark.parametrize(
    ("spec", "step", "look"),
    [(spec, "eager", 1) for spec in (*UNAIDED, *OWN_RULES)] + [(s, "fixed", 4) for s in FIXED],
)
def test_tokens_are_those_of_generate(
    spec: str, step: str, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loop.SYNC_EVERY, "cpu", look)
    events: list[Event] = []
    with started(spec, step=step) as engine, torch.no_grad():
        for index in (0, 1, 2):  # two long ones at once, and then rows that change hands
            add(engine, index)
        events.extend(engine.loop.advance())
        add(engine, 3)
        add(engine, 4)
        while engine.loop.busy:
            events.extend(engine.loop.advance())
        assert engine.loop.free == [0, 1, 2] and not engine.loop.active
    for index, prompt in enumerate(PROMPTS):
        (expected,) = kvpolicies.generate(
            tiny(), [prompt], spec, BUDGET, max_new_tokens=NEW, eos_token_id=-1
        )
        assert tokens(events, index) == expected.tokens
        (done,) = [e.generation for e in events if e.index == index and e.generation]
        assert (done.max_slots, done.finish) == (expected.max_slots, "length")


@pytest.mark.parametrize("spec", ["full", "streaming"])
def test_the_others_get_a_token_between_two_chunks(spec: str) -> None:
    with started(spec) as engine, torch.no_grad():
        add(engine, 0, 40)
        list(engine.loop.advance())
        add(engine, 2)  # 100 tokens
        forwards = watch(engine)
        turns = 0
        while not tokens(events := list(engine.loop.advance()), 2):
            turns += 1
            assert len(tokens(events, 0)) == 1 and len(forwards) == turns
        sizes = [counts[0] for _, counts in forwards]
        steps = [BUDGET.total, *[BUDGET.chunk] * 6, 2]
        assert sizes == ([*[CHUNK] * 12, 4] if spec == "full" else steps)


def test_prompts_share_a_chunk_and_a_short_one_does_not_wait_for_a_long_one() -> None:
    with started("full") as engine, torch.no_grad():
        forwards = watch(engine)
        add(engine, 2)
        add(engine, 4)  # 3 tokens
        first = list(engine.loop.advance())
        assert forwards == [([4, 2], [3, 4])] or forwards == [([2, 4], [4, 3])]
        assert tokens(first, 4) and not tokens(first, 2)
        list(engine.loop.advance())
        assert forwards[1] == ([2], [CHUNK])


def test_a_row_is_free_at_once_when_its_prompt_is_cancelled_on_its_way() -> None:
    with started("full") as engine, torch.no_grad():
        add(engine, 0, 30)
        gone = add(engine, 2)
        list(engine.loop.advance())
        assert gone.waiting and len(engine.loop.free) == 1
        gone.cancelled = True
        forwards = watch(engine)
        events = list(engine.loop.advance())
        assert Event(2, [], "cancelled") in events
        assert all(2 not in indices for indices, _ in forwards)
        assert len(engine.loop.free) == 2
        add(engine, 3)
        add(engine, 4)
        while engine.loop.busy:
            events.extend(engine.loop.advance())
    (expected,) = kvpolicies.generate(
        tiny(), [PROMPTS[3]], "full", 128, max_new_tokens=NEW, eos_token_id=-1
    )
    assert tokens(events, 3) == expected.tokens


def test_steps_of_fixed_shapes_write_to_no_row_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with started("full", step="fixed") as engine, torch.no_grad():
        sizes: list[int] = []
        step = engine.loop.fixed.step

        def watched(new: Any, fed: list[int]) -> Any:
            size = loop.bucket(len(fed), 3)
            sizes.append(size)
            assert all(r.row >= size for r in engine.loop.active if r.waiting)
            return step(new, fed)

        monkeypatch.setattr(engine.loop.fixed, "step", watched)
        add(engine, 0, 30)
        list(engine.loop.advance())
        add(engine, 2)
        add(engine, 3)
        while engine.loop.busy:
            list(engine.loop.advance())
    assert 1 in sizes and 3 in sizes


def test_a_chunk_of_nothing_is_refused() -> None:
    with (
        pytest.raises(UserError, match="prefill_chunk"),
        serving(tiny(), "full", 64, rows=1, max_length=64, prefill_chunk=0),
    ):
        pass
