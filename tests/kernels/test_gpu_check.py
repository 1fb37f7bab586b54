"""scripts/gpu_check.py on a CPU: tiny shapes through Triton's interpreter, one table, one JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


@pytest.mark.slow
def test_the_dry_run_passes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(done.stdout.splitlines()) - 1
    assert all(row["ok"] for row in rows)
    checks = " ".join(row["check"] for row in rows)
    parts = ("decode attention", "observation scores", "fixed decoding, beacon", "small full")
    for part in (*parts, "kvpop, a layer's scores", "training step, small, kvpop_mlp"):
        assert part in checks


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "use --dry-run" in done.stderr
    assert not (tmp_path / "x.json").exists()
