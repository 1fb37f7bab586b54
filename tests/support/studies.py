"""Finished study folders with made-up grades, written through the code that writes real ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicies.eval.study import provenance
from kvpolicies.eval.study.config import Study, cells
from kvpolicies.eval.study.results import Results
from kvpolicies.eval.study.summary import FULL
from kvpolicies.eval.tasks.task import Problem

MODEL = {"class": "Made", "weights": "0123456789abcdef"}


def make_study(
    folder: Path, grades: Mapping[str, np.ndarray], *, length: int = 300, prompt: int = 60,
    weights: str = MODEL["weights"], name: str = "p", **options: Any,
) -> Path:  # fmt: skip
    """A study of `grades`: {"full": [P, S], "rkv @ 101": [P, S], ...}, 1 = right."""
    named = [key.split(" @ ") for key in grades if key != FULL]
    problems, samples = grades[FULL].shape
    temperature = {"temperature": 0.6} if samples > 1 else {}
    study = Study(
        policies=tuple(dict.fromkeys(policy for policy, _ in named)),
        budgets=tuple(dict.fromkeys(budget for _, budget in named)) or ("101",),
        **{"problems": problems, "samples": samples, "out": str(folder), **temperature, **options},
    ).resolved()
    made = [Problem(f"{name}{i}", f"text {i}", str(i)) for i in range(problems)]
    provenance.open_folder(study, made, {**MODEL, "weights": weights})
    with Results(folder) as results:
        for cell in cells(study):
            key = FULL if cell.policy == FULL else f"{cell.policy} @ {cell.budget}"
            for i, s in np.ndindex(problems, samples):
                slots = int(cell.budget) if cell.budget.isdigit() else 100
                results.add(
                    {
                        "policy": cell.policy, "budget": cell.budget, "problem": made[i].id,
                        "sample": s, "correct": float(grades[key][i, s]), "finish": "stop",
                        "prompt_tokens": prompt, "length": length, "slots": slots,
                        "max_slots": slots, "cache_bytes": 1, "state_bytes": 0, "seconds": 0.5,
                        "tokens": [], "text": "", "lookups": 1, "lookups_right": 1,
                    }
                )  # fmt: skip
    return folder
