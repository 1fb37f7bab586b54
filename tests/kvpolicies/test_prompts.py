"""Which tokens are the prompt: every policy is told, whoever runs the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.policy import Observation, Policy, Scores, View
from tests.support.models import padded, prompts, tiny

TOLD: list[tuple[int, int]] = []


@dataclass(frozen=True, kw_only=True)
class Listening(Policy):
    """Notes (tokens seen, prompt tokens) of every row that it is shown."""

    name = "listening"

    def observe(self, view: View, step: Observation) -> None:
        if view.layer == 0:
            TOLD.extend(zip(view.seen, view.prompts, strict=True))

    def scores(self, view: View) -> Scores:
        return view.positions.float()


def told() -> dict[int, set[tuple[int, int]]]:
    """By prompt length, of what was told once a prompt was complete; empties the notes."""
    after: dict[int, set[tuple[int, int]]] = {}
    for seen, prompt in TOLD:
        assert prompt <= seen
        if seen > prompt:
            after.setdefault(prompt, set()).add((seen, prompt))
    TOLD.clear()
    return after


def through_transformers(lengths: tuple[int, ...], new: int, **options: Any) -> None:
    model, ids = tiny(), padded(prompts(*lengths))
    cache = kvpolicies.FixedBudgetCache(model, Listening(), Budget(24, 2, 8))
    with kvpolicies.attach(model, cache):
        model.generate(
            ids[0],
            attention_mask=ids[1],
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )


LENGTHS = (1, 5, 24, 25, 70)
EXPECTED = {p: {(p + k, p) for k in range(1, 5)} for p in LENGTHS}


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_our_loop_tells_it(rows: int):
    kvpolicies.generate(
        tiny(), prompts(*LENGTHS), Listening(), Budget(24, 2, 8), max_new_tokens=5, batch_size=rows,
        eos_token_id=-1, step="fixed" if rows == 2 else "eager",
    )  # fmt: skip
    assert told() == EXPECTED


@pytest.mark.parametrize("chunk", [None, 9])
def test_so_does_what_transformers_hands_over(chunk: int | None):
    through_transformers(LENGTHS, 5, **({"prefill_chunk_size": chunk} if chunk else {}))
    assert told() == EXPECTED
