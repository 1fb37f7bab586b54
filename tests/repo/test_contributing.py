"""The new policy that CONTRIBUTING.md shows is real: it is read from there, registered and run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from kvpolicies import Budget, generate, registry
from tests.support.models import tiny

ROOT = Path(__file__).resolve().parents[2]


def example() -> tuple[str, str, str]:
    """(source of the example, its name, its "module:Class"), as the page shows them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    line = re.search(r'^    "(\w+)": "(kvpolicies[\w.]+:\w+)",$', text, flags=re.MULTILINE)
    assert len(blocks) == 1 and line, "CONTRIBUTING.md shows one policy and its line of the table"
    return blocks[0], line[1], line[2]


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example's name, after doing what the page says (undone after the test)."""
    source, name, target = example()
    module_name = target.partition(":")[0]
    file = tmp_path / "example.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module_name, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(registry.POLICIES, name, target)
    return name


def test_it_takes_fewer_than_forty_lines() -> None:
    source, *_ = example()
    assert len(source.splitlines()) + 1 < 40


def test_it_is_listed_and_prints_as_its_own_name(registered: str) -> None:
    assert registered in registry.policy_names()
    assert str(registry.resolve(registered)) == registered
    assert str(registry.resolve(f"{registered}(order=1.0)")) == f"{registered}(order=1.0)"
    row = next(row for row in registry.describe() if row[0] == registered)
    assert "norm" in row[1] and "arXiv" in row[2] and "order=2.0" in row[3]


def test_it_generates_within_the_budget(registered: str) -> None:
    budget = Budget(16, sinks=2, window=4)
    prompts = [list(range(1, 25)), list(range(30, 40))]
    done = generate(tiny("llama"), prompts, registered, budget, max_new_tokens=20, eos_token_id=[])
    assert [len(g.tokens) for g in done] == [20, 20]
    assert [g.max_slots for g in done] == [16, 16]


def test_another_package_registers_it_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, name, target = example()
    (tmp_path / "their_keynorm.py").write_text(source)
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    cls = target.partition(":")[2]
    entry = f"[kvpolicies.policies]\n{name} = their_keynorm:{cls}\n"
    (info / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    assert str(registry.resolve(name)) == name
    assert type(registry.resolve(name)).__module__ == "their_keynorm"
