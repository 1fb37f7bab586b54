"""The choice between torch and Triton: what is asked for, what runs; Triton is optional."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvpolicies.kernels import backend
from kvpolicies.kernels.jit import INTERPRETED, triton

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")

WITHOUT = """
import sys
sys.modules["triton"] = None
import torch
from kvpolicies.kernels import attention, backend, compact, decode, fps, observe, redundancy
assert backend.described(torch.device("cpu")) == "torch"
print(fps.farthest_points(torch.eye(3), 2).tolist())
try:
    with backend.backend("triton"):
        pass
except ValueError as error:
    print(error)
"""


def test_the_choice_holds_inside_only() -> None:
    assert backend.chosen() == "auto"
    with backend.backend("torch"):
        assert backend.chosen() == "torch"
        with backend.backend("auto"):
            assert backend.chosen() == "auto"
        assert backend.chosen() == "torch"
    assert backend.chosen() == "auto"


def test_another_word_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"auto, torch, triton, got 'cuda'"),
        backend.backend("cuda"),
    ):
        pass


def test_on_the_cpu_auto_is_torch() -> None:
    assert backend.described(CPU) == "torch"
    assert not backend.use_triton(torch.ones(1))


@pytest.mark.skipif(triton is None or INTERPRETED, reason="Triton is not installed")
def test_triton_on_the_cpu_is_refused_outside_its_interpreter() -> None:
    with backend.backend("triton"), pytest.raises(ValueError, match="Triton needs a GPU"):
        backend.use_triton(torch.ones(1))


def test_without_triton_all_imports_and_torch_serves() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[0, 1]",
        "kernels: triton asked for, but not installed (pip install triton)",
    ]
