"""One small study of the embedded model, run once and read by several tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpolicies.eval.study import run
from kvpolicies.eval.study.config import Study

SMALL = Study(
    policies=("streaming", "random"), budgets=("40",), problems=4, length=80, batch_size=2
)


@pytest.fixture(scope="session")
def small_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    """(resolved study, its finished folder): 3 cells of 4 problems. Read it, do not write."""
    from dataclasses import replace

    study = replace(SMALL, out=str(tmp_path_factory.mktemp("small") / "out"))
    folder = run.run_study(study)
    from kvpolicies.eval import report

    report.write_report(folder, study.resolved())
    return study.resolved(), folder


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with benchmark files, from KVPOLICIES_DATA."""
    folder = os.environ.get("KVPOLICIES_DATA")
    if not folder:
        pytest.skip("set KVPOLICIES_DATA to the folder with gsm8k_300.jsonl, math500_half.jsonl")
    return Path(folder)
