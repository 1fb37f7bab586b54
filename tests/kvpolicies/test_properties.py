"""300 drawn cases of what must hold for any policy, model, budget and batch:

    OMP_NUM_THREADS=1 pytest -m slow tests/kvpolicies/test_properties.py

In each, several prompts decode together, in one of five ways to bring them in. A head never holds
more than the budget; sinks and window stay; a row of the batch is the row alone, token for token
and eviction for eviction; and one dense forward under the mask of the eviction times gives the
decode's own logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.sampling import Sampling
from kvpolicies.serving import serving
from tests.support.models import FAMILIES, padded, prompts, tiny
from tests.support.specs import SPECS, UNAIDED, UNTRACED

CASES = 300
WAYS = ("generate", "rows", "fixed", "transformers", "turns")
DRAWN = [s for s in UNAIDED if s != "full" and s not in UNTRACED]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """What is drawn from a number."""

    spec: str
    family: str
    budget: Budget
    rows: list[list[int]]
    new: int
    way: str
    chunk: int

    @classmethod
    def of(cls, number: int) -> "Case":
        rng = np.random.default_rng([12, number])
        spec = DRAWN[number % len(DRAWN)]
        # Scorers of tests are made for one model, and read tokens within a window of eight.
        learned = "random/" in spec
        sinks, window = int(rng.integers(0, 5)), int(rng.integers(12 if learned else 0, 16))
        total = sinks + window + int(rng.integers(2, 20))
        lengths = rng.choice([1, 2, 9, total - 1, total, total + 1, 2 * total], 2)
        return cls(
            spec,
            "qwen3" if learned else str(rng.choice(list(FAMILIES))),
            Budget(total, sinks, window),
            prompts(*(int(max(1, n)) for n in lengths), seed=number),
            int(rng.integers(4, 12)),
            WAYS[number % len(WAYS)],
            int(rng.integers(1, 40)),
        )


Row = tuple[list[int], Tensor]
"""A row's new tokens, and its eviction times [layers, H, T]."""


def run(case: Case, rows: list[list[int]], **options: Any) -> list[Any]:
    return kvpolicies.generate(
        tiny(case.family), rows, case.spec, case.budget, max_new_tokens=case.new,
        eos_token_id=-1, request_ids=[0] * len(rows), trace=True, **options,
    )  # fmt: skip


def by_transformers(case: Case) -> list[Row]:
    model, (ids, mask) = tiny(case.family), padded(case.rows)
    length = ids.shape[1] + case.new
    cache = kvpolicies.FixedBudgetCache(
        model, case.spec, case.budget, max_length=length, trace=True
    )
    with kvpolicies.attach(model, cache):
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=case.new, do_sample=False, pad_token_id=0,
            eos_token_id=None, past_key_values=cache, prefill_chunk_size=case.chunk,
        )  # fmt: skip
    assert max(cache.max_slots(i) for i in range(len(case.rows))) <= case.budget.total
    lengths = [len(row) + case.new - 1 for row in case.rows]
    return [(out[i, ids.shape[1] :].tolist(), cache.times(i, n)) for i, n in enumerate(lengths)]


def by_turns(case: Case) -> list[list[int]]:
    """Prompts come in between the tokens of others, as in a server; no trace there."""
    tokens: dict[int, list[int]] = {i: [] for i in range(len(case.rows))}
    options: dict[str, Any] = {"rows": 2, "max_length": 200, "prefill_chunk": case.chunk}
    with (
        serving(tiny(case.family), case.spec, case.budget, eos_token_id=-1, **options) as engine,
        torch.no_grad(),
    ):
        for i, row in enumerate(case.rows):
            engine.loop.add(engine.request(i, row, case.new, Sampling()))
        while engine.loop.busy:
            for event in engine.loop.advance():
                tokens[event.index].extend(event.tokens)
    return [tokens[i] for i in range(len(case.rows))]


def times_end(times: Tensor) -> Tensor:
    """Times after the last token that counts are never."""
    return torch.where(times < times.shape[-1], times, kvpolicies.trace.NEVER)


@pytest.mark.parametrize("number", range(CASES))
def test_case(number: int) -> None:
    case = Case.of(number)
    alone = []
    for row in case.rows:
        decoded: dict[int, Tensor] = {}
        (out,) = run(case, [row], on_logits=lambda _, step, x, d=decoded: d.update({step: x}))
        assert out.max_slots <= case.budget.total
        protects(out, case)
        replays(case, out, row, decoded)
        alone.append(out)
    if case.way == "turns":
        assert by_turns(case) == [out.tokens for out in alone]
    elif case.way == "transformers":
        for (tokens, times), out in zip(by_transformers(case), alone, strict=True):
            assert tokens == out.tokens
            assert torch.equal(times_end(times), out.trace.times[0])
    else:
        ways: dict[str, Any] = {"rows": {"batch_size": 2}, "fixed": {"step": "fixed"}}
        together = run(case, case.rows, **ways.get(case.way, {}))
        for ours, out in zip(together, alone, strict=True):
            assert ours.tokens == out.tokens and ours.max_slots == out.max_slots
            assert torch.equal(ours.trace.times, out.trace.times)


def protects(out: Any, case: Case) -> None:
    """Sinks and window of every query are kept, and no query sees more than the budget."""
    budget, n = case.budget, out.trace.times.shape[-1]
    query = torch.arange(n)
    past, age = query <= query[:, None], query[:, None] - query  # [query, token]
    kept = past & (query[:, None] < out.trace.times[..., None, :])
    must = past & ((query < budget.sinks) | (age < budget.window))
    assert "faithful" in case.spec or (kept | ~must).all()
    assert int(kept.sum(-1).max()) <= budget.total


def replays(case: Case, out: Any, prompt: list[int], decoded: dict[int, Tensor]) -> None:
    """One masked dense forward gives the decode's logits."""
    logits = kvpolicies.replay(tiny(case.family), out.trace)
    for step, row in decoded.items():
        assert (logits[0, len(prompt) - 1 + step] - row).abs().max() <= 1e-4


def test_every_policy_is_drawn() -> None:
    left = {s for s in SPECS if s not in DRAWN}
    assert left == {"full", "oracle", *UNTRACED}
    assert {Case.of(i).spec for i in range(CASES)} == set(DRAWN)
    assert {Case.of(i).way for i in range(CASES)} == set(WAYS)
