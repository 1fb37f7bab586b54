"""Triton's kernels compiled for GPUs that are not here: they compile, and spill no register."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
# Shared memory that a program may have on these GPUs (sm_80: 163 KB, sm_90: 227 KB).
SHARED = {80: 163 << 10, 90: 227 << 10}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_spills() -> None:
    """A selection; `python -m tests.kernels.ahead_triton` compiles all."""
    command = [sys.executable, "-m", "tests.kernels.ahead_triton", "--json", "--quick"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    assert {row["arch"] for row in rows} == set(SHARED)
    assert not [row for row in rows if row["spilled"]]
    assert not [row for row in rows if row["shared"] > SHARED[row["arch"]]]
