"""Policies beyond the first ten: which positions are kept, against slow numpy references."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvpolicies.learned.statistics import FILE
from tests.support.against import compare, spec_of
from tests.support.cases import Needs, draw_batch
from tests.support.scorers import save_statistics

REAL = ("real",) * 5
# Policy and options; slots of the smallest budget.
RUNS: list[tuple[str, dict[str, Any], int]] = [
    ("expected", {"ahead": 64}, 0),
    ("expected", {"observe_window": 7, "ahead": 9, "epsilon": 0.0, "every": 4}, 0),
    ("expected", {"faithful": True, "ahead": 16}, 5),
    ("raas", {"alpha": 0.05}, 0),
    ("raas", {"top": 0.3}, 0),
    ("raas", {"alpha": 0.05, "faithful": True}, 2),
    ("gkv", {"observe_window": 4}, 0),
    ("gkv", {"faithful": True, "observe_window": 4, "every": 8, "decay": 0.6}, 5),
    ("vase", {"observe_window": 4}, 0),
    ("vase", {"observe_window": 4, "sample": False, "share": 0.3}, 0),
    ("vase", {"form": "dkv", "observe_window": 4}, 0),
    ("vase", {"faithful": True, "observe_window": 4}, 9),
    ("dropkv", {"observe_window": 4}, 0),
    ("dropkv", {"faithful": True, "observe_window": 4}, 5),
    ("longflow", {}, 0),
    ("longflow", {"faithful": True}, 0),
    ("criticalkv", {"observe_window": 4}, 0),
    ("criticalkv", {"observe_window": 4, "defensive": True, "kernel": 3}, 0),
    ("criticalkv", {"faithful": True, "observe_window": 4}, 5),
]
BATCHES = 10


@pytest.mark.parametrize(
    ("name", "options", "slots"), [pytest.param(*run, id=spec_of(*run[:2])) for run in RUNS]
)
def test_kept_positions(
    name: str, options: dict[str, Any], slots: int, reference: ModuleType
) -> None:
    keeps_prompt = name == "raas" and "faithful" in options
    needs = Needs(slots=slots, kinds=REAL, beside=1 if keeps_prompt else None)
    batches = [draw_batch(spec_of(name, options), i, needs) for i in range(BATCHES)]
    # Steps are whole numbers: of those of raas, ties are exact in float32 too.
    compare(name, options, batches, lambda kind: name == "raas", reference)


@pytest.mark.parametrize(
    "options", [{}, {"every": 4, "ahead": 8, "standardise": False}, {"every": 8, "faithful": True}]
)
def test_kept_positions_of_triattention(
    options: dict[str, Any], reference: ModuleType, tmp_path: Path
) -> None:
    needs = Needs(slots=8, kinds=REAL, beside=1 if "faithful" in options else None)
    sizes: dict[str, Any] = dict(heads=2, group=2, dim=16)
    batches = [replace(draw_batch(f"tri{options}", i, needs), **sizes) for i in range(BATCHES)]
    save_statistics(tmp_path / FILE, {}, (0,), 2, 2, 16)
    options = {"statistics": str(tmp_path / FILE), **options}
    compare("triattention", options, batches, lambda kind: False, reference)
