"""Policies beyond the first ten: which positions are kept, against slow numpy references."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.support.against import compare, spec_of
from tests.support.cases import Needs, draw_batch

REAL = ("real",) * 5
# Policy and options; slots of the smallest budget.
RUNS: list[tuple[str, dict[str, Any], int]] = [
    ("expected", {"ahead": 64}, 0),
    ("expected", {"observe_window": 7, "ahead": 9, "epsilon": 0.0, "every": 4}, 0),
    ("expected", {"faithful": True, "ahead": 16}, 5),
]
BATCHES = 10


@pytest.mark.parametrize(
    ("name", "options", "slots"), [pytest.param(*run, id=spec_of(*run[:2])) for run in RUNS]
)
def test_kept_positions(
    name: str, options: dict[str, Any], slots: int, reference: ModuleType
) -> None:
    needs = Needs(slots=slots, kinds=REAL)
    batches = [draw_batch(spec_of(name, options), i, needs) for i in range(BATCHES)]
    compare(name, options, batches, lambda kind: False, reference)
