"""Triton's kernels on the CPU, by its interpreter: one process runs all `*_triton_cases.py`.

Triton reads TRITON_INTERPRET when a kernel is decorated, so the cases have a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = sorted(HERE.glob("*_triton_cases.py"))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Per file of cases: what failed, or why it did not run; "passed" if it did."""
    report = tmp_path_factory.mktemp("triton") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *map(str, CASES)]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        said = found.setdefault(Path(case.get("file", "")).name, [])
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                said.append(f"{case.get('name')}: {child.get('message')}\n{child.text}")
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", [path.name for path in CASES])
def test_equal_to_the_reference(file: str, outcome: dict[str, list[str]]) -> None:
    assert file in outcome, f"{file} has no cases: {list(outcome)}"
    assert not outcome[file], "\n".join(outcome[file])
