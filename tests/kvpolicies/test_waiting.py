"""A decode step never waits for the device: nothing is read back, and host numbers are sent async.

There need be no GPU to see it: what would wait there is an operator that hands a tensor's value to
the host, or a tensor made from host numbers on the device.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies import loop
from kvpolicies.budget import Budget
from kvpolicies.slots import SlotGroup
from tests.support.futures import continuation
from tests.support.models import prompts, tiny
from tests.support.reading import Reading
from tests.support.specs import LOOKING_AHEAD, REPLAYABLE

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = prompts(5, 70, 17, 33, 1, 100)
LIMITS = [3, 40, 9, 25, 12, 33]


def run(spec: str, **options: Any) -> list[Any]:
    if spec in LOOKING_AHEAD:
        options["forced"] = [continuation(p, n) for p, n in zip(PROMPTS, LIMITS, strict=True)]
    options = {"batch_size": 5, "max_new_tokens": LIMITS, "eos_token_id": -1, **options}
    return kvpolicies.generate(tiny(), PROMPTS, spec, Budget(32, 2, 8), trace=True, **options)


def same(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.choices, a.finish) == (b.tokens, b.choices, b.finish)
        assert a.max_slots == b.max_slots
        assert torch.equal(a.trace.times, b.trace.times)


@pytest.mark.parametrize("step", ["eager", "fixed"])
@pytest.mark.parametrize("spec", ["streaming", "beacon(n_beacon=4, n_recent=4)", "h2o", "oracle"])
def test_looking_at_tokens_now_and_then_changes_nothing(
    spec: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = [run(spec, step=step, temperature=t, seed=3) for t in (0.0, 1.0)]
    monkeypatch.setitem(loop.SYNC_EVERY, "cpu", 7)
    for before, t in zip(often, (0.0, 1.0), strict=True):
        same(run(spec, step=step, temperature=t, seed=3), before)


def test_what_comes_after_a_stop_token_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    free = run("streaming")
    stops = [free[1].tokens[5], free[3].tokens[11]]
    before = run("streaming", eos_token_id=stops)
    assert {g.finish for g in before} == {"stop", "length"}
    monkeypatch.setitem(loop.SYNC_EVERY, "cpu", 8)
    same(run("streaming", eos_token_id=stops), before)


@pytest.mark.parametrize("step", ["eager", "fixed"])
@pytest.mark.parametrize("spec", REPLAYABLE)
def test_nothing_is_read_back_in_a_step(
    spec: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loop.SYNC_EVERY, "cpu", 8)
    # On a CPU, where it costs nothing, a NaN is found at once.
    monkeypatch.setattr(SlotGroup, "check_scores", lambda self: None)
    reading, decode, steps = Reading(), loop.Loop._decode, [0]

    def watched(self: Any, active: Any) -> None:
        steps[0] += 1
        with reading:
            decode(self, active)

    monkeypatch.setattr(loop.Loop, "_decode", watched)
    run(spec, step=step)
    assert steps[0] > 4 and reading.seen == []


def test_the_watch_sees_what_waits() -> None:
    x, reading = torch.arange(4.0), Reading()
    with reading:
        _ = bool(x.any()), x.max().item(), x[x > 1], x.nonzero()
    assert len(reading.seen) >= 4


def test_host_numbers_are_sent_by_one_function() -> None:
    """`torch.tensor(..., device=...)` waits for the GPU; `transfer.on_device` does not."""
    files = ["step", "rows", "slots", "fixed", "policy", "observation", "rope"]
    paths = [ROOT / "kvpolicies" / f"{name}.py" for name in files]
    for room in ("kvpolicies/baselines", "beacon", "learned"):
        paths += sorted((ROOT / room).glob("*.py"))
    assert len(paths) > 25
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.tensor",
                "torch.as_tensor",
            ):
                raise AssertionError(f"{path.name}:{node.lineno}: use transfer.on_device")
