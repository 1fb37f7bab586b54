"""Layers that a policy is shown at once evict what they evict one by one."""

from __future__ import annotations

import pytest

from kvpolicies import slots
from kvpolicies.decoding import generate
from kvpolicies.registry import resolve
from tests.support.models import prompts, tiny
from tests.support.specs import EVICTING

PROMPTS = prompts(9, 50, 31)


ALIKE = [s for s in EVICTING if resolve(s).layers_alike and not resolve(s).rerotates]


@pytest.mark.parametrize("spec", ALIKE)
def test_layers_at_once_are_layers_one_by_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(layers=5)
    shown: list[int] = []
    view = slots.SlotGroup.view

    def watched(self, y, rows, lengths, seen, prompts, n=1, *more):
        shown.append(n)
        return view(self, y, rows, lengths, seen, prompts, n, *more)

    monkeypatch.setattr(slots.SlotGroup, "view", watched)

    def run(at_once: int):
        monkeypatch.setattr(slots, "SLOTS_AT_ONCE", at_once)
        shown.clear()
        return generate(
            model, PROMPTS, spec, 40, max_new_tokens=60, eos_token_id=-1, trace=True, batch_size=2
        ), max(shown)

    # 2 rows, 2 KV heads, 40 slots: all five layers; two and two and one; each alone.
    for at_once, most in ((1 << 18, 5), (2 * 2 * 40 * 2, 2)):
        together, n = run(at_once)
        assert n == most
        alone, n = run(0)
        assert n == 1
        for one, other in zip(together, alone, strict=True):
            assert one.tokens == other.tokens
            assert one.trace is not None and other.trace is not None
            assert one.trace.times.equal(other.trace.times)
