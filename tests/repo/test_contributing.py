"""The new policy that CONTRIBUTING.md shows is real: it is read from there, registered and run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example() -> tuple[str, str, str]:
    """(source of the example, its name, its "module:Class"), as the page shows them."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    line = re.search(r'^    "(\w+)": "(kvpolicies[\w.]+:\w+)",$', TEXT, flags=re.M)
    assert len(blocks) == 1 and line, "CONTRIBUTING.md shows one policy and its line of the table"
    return blocks[0], line[1], line[2]


def test_it_takes_fewer_than_forty_lines() -> None:
    assert len(example()[0].splitlines()) + 1 < 40
