"""Decode steps of fixed shapes give what eager steps give: tokens, and every eviction."""

import shutil
from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.fixed import bucket
from tests.kvpolicies.test_families import model_of
from tests.support.futures import continuation
from tests.support.models import prompts, tiny
from tests.support.specs import LOOKING_AHEAD, OWN_RULES, REPLAYABLE

PROMPTS = prompts(5, 70, 17, 33, 1, 100)
LIMITS = [3, 40, 9, 25, 12, 33]


def run(spec: str, step: str, model: Any = None, **kw: Any) -> list[Any]:
    if spec in LOOKING_AHEAD:
        kw["forced"] = [continuation(p, n) for p, n in zip(PROMPTS, LIMITS, strict=True)]
    options = {"batch_size": 5, "eos_token_id": -1, "trace": True, "max_new_tokens": LIMITS, **kw}
    return kvpolicies.generate(
        model or tiny(), PROMPTS, spec, Budget(32, 2, 8), step=step, **options
    )


def same(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.tokens == b.tokens and a.max_slots == b.max_slots
        assert torch.equal(a.trace.times, b.trace.times)


@pytest.mark.parametrize("spec", [*REPLAYABLE, *OWN_RULES])
def test_fixed_shapes_change_nothing(spec: str) -> None:
    """Through rows that finish, buckets that shrink, and idle rows in a bucket."""
    same(run(spec, "fixed"), run(spec, "eager"))


HYBRID = ["gpt-oss, sinks", "gemma2, soft-capped", "gemma3, a rotation a kind of layer"]


@pytest.mark.parametrize("case", HYBRID)
def test_hybrid_models(case: str) -> None:
    model = model_of(case)
    same(run("snapkv", "fixed", model), run("snapkv", "eager", model))


@pytest.mark.parametrize("spec", ["full", "streaming", "beacon(n_beacon=4, n_recent=4)", "h2o"])
@pytest.mark.parametrize(
    ("lengths", "limits", "budget"),
    [
        ((5, 5, 5, 5, 1, 1, 1), (3, 3, 3, 40, 5, 5, 5), Budget(16, 2, 4)),
        ((5, 5, 5, 5, 20, 20, 20), (3, 3, 3, 40, 5, 5, 5), Budget(9, 2, 4)),  # chunks of one token
    ],
)
def test_prompts_of_one_token_leave_a_decoding_row_alone(
    spec: str, lengths: tuple[int, ...], limits: tuple[int, ...], budget: Budget
) -> None:
    """New rows that are prefilled by single tokens beside a row that decodes above them."""
    options: dict[str, Any] = {"batch_size": 4, "eos_token_id": -1, "trace": True}
    runs = [
        kvpolicies.generate(
            tiny(), prompts(*lengths), spec, budget, max_new_tokens=limits, step=step, **options
        )
        for step in ("fixed", "eager")
    ]
    same(*runs)


def test_sampling_is_the_same() -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    same(run("streaming", "fixed", **options), run("streaming", "eager", **options))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize(
    "spec", ["beacon(n_beacon=4, n_recent=4)", "h2o", "dms(scorer='random/dms')"]
)
def test_compiled(spec: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": [20] * 6, "batch_size": 6}
    torch._dynamo.utils.counters.clear()
    same(run(spec, "compiled", **options), run(spec, "eager", **options))
    stats = torch._dynamo.utils.counters
    assert not stats["graph_break"] and stats["stats"]["unique_graphs"] == 1


def test_buckets_are_powers_of_two_within_the_batch() -> None:
    assert [bucket(n, 12) for n in (1, 2, 3, 5, 8, 9, 12)] == [1, 2, 4, 8, 8, 12, 12]


@pytest.mark.parametrize(
    ("spec", "step", "message"),
    [
        ("streaming", "graph", "CUDA graph"),
        ("streaming", "fast", "step must be auto, eager"),
        ("streaming(positions='cache')", "fixed", "step='eager' only"),
    ],
)
def test_what_cannot_run_is_refused(spec: str, step: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kvpolicies.generate(tiny(), PROMPTS, spec, 40, max_new_tokens=2, step=step)
