"""The order of the rooms, read from the syntax tree.

kernels < kvpolicies < {beacon, learned} < eval < train: each room imports to its left only. Every
import counts, also one inside a function, under TYPE_CHECKING, or spelt as a string such as
"kvpolicies.eval.commands.compare". The tables of
strings that keep the arrows from running back (the dicts at the top of registry.py and cli.py) are
the one exemption. Inside eval: {display, stats, sandbox} < tasks < study < {report, select,
revisit, bench} < {commands, harness}. The checker is itself checked on made-up trees.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "kernels": {"kernels"},
    "kvpolicies": {"kernels", "kvpolicies"},
    "beacon": {"kernels", "kvpolicies", "beacon"},
    "learned": {"kernels", "kvpolicies", "learned"},
    "eval": {"kernels", "kvpolicies", "beacon", "learned", "eval"},
    "train": {"kernels", "kvpolicies", "beacon", "learned", "eval", "train"},
}
# Inside eval each room imports to its left only; those of one rank never import each other.
RANKS = ({"display", "stats", "sandbox"}, {"tasks"}, {"study"}, {"report", "select", "revisit",
         "bench"}, {"commands", "harness"})  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
TABLES = {"kvpolicies/registry.py", "kvpolicies/cli.py"}

# What only some files may import: a dotted prefix -> the files or folders that may.
ONLY_IN = {
    "lightning": ("train/",),
    "pytorch_lightning": ("train/",),
    "xlstm": ("learned/scorer.py",),
    "mlstm_kernels": ("learned/scorer.py",),
}
# transformers' submodules change between releases: one file knows them, and who else knows what.
INTERNALS = {
    "kvpolicies/adapter.py": ("transformers",),
    "kvpolicies/cache.py": ("transformers.cache_utils",),
    "kvpolicies/passing.py": ("transformers.cache_utils",),
}

_MODULE_STRING = re.compile(r"kvpolicies(\.\w+)+(:\w+)?")


def imports(tree: ast.Module, is_table: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for each thing imported; `from a import b` yields "a.b"."""
    exempt = set(_table_entries(tree)) if is_table else set()
    for node in ast.walk(tree):
        if node in exempt:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in {"kvpolicies", "transformers"}:
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Constant) and _MODULE_STRING.fullmatch(str(node.value)):
            yield node.lineno, str(node.value).partition(":")[0]


def _table_entries(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes inside the dicts that a module assigns at its top level."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            yield from ast.walk(node.value)


def complaint(file: str, name: str) -> str | None:
    """Say why `file` ("room/path.py") may not import the dotted `name`, or None if it may."""
    room, parts = file.split("/")[0], name.split(".")
    if name.startswith("."):
        return "relative import"
    if parts[0] in MAY_IMPORT and parts[0] != "kvpolicies":
        return f"bare name of a room: import kvpolicies.{parts[0]}"
    if parts[0] == "kvpolicies":
        target = parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "kvpolicies"
        if target not in MAY_IMPORT[room]:
            return f"{room} may not import {target}"
        return _inside_eval(file, parts[2:]) if room == target == "eval" else None
    if room == "kernels" and parts[0] not in {"torch", "triton"} | sys.stdlib_module_names:
        return "kernels import torch, triton and the standard library only"
    if parts[0] in ONLY_IN and not file.startswith(ONLY_IN[parts[0]]):
        return f"{parts[0]} is imported in {ONLY_IN[parts[0]][0]} only"
    internal = parts[0] == "transformers" and parts[1:] and _is_submodule(parts[1])
    if internal and not name.startswith(INTERNALS.get(file, ())):
        return f"transformers' internals are known in {', '.join(INTERNALS)} only"
    return None


def _inside_eval(file: str, parts: list[str]) -> str | None:
    """Says why a file of eval may not import what lies at `parts` in eval, if it may not."""
    own = file.split("/")[1].removesuffix(".py")
    if own == "__init__" or not parts or parts[0] == own:
        return None
    for room in (own, parts[0]):
        if room not in RANK:
            return f"eval has no room {room}: {', '.join(RANK)}"
    return None if RANK[parts[0]] < RANK[own] else f"eval's {own} may not import its {parts[0]}"


def _is_submodule(name: str) -> bool:
    """Submodules of transformers have lower-case names, unlike its public classes."""
    return name.islower() and not name.startswith("__")


def python_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield ("room/path.py", path) of the real files, not following links."""
    for room in MAY_IMPORT:
        for folder, _, names in os.walk(root / room, followlinks=False):
            paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
            yield from ((path.relative_to(root).as_posix(), path) for path in paths)


def violations(root: Path) -> list[str]:
    """All complaints about the tree at `root`, as "file:line: name: why"."""
    found = []
    for file, path in python_files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=file)
        for line, name in imports(tree, file in TABLES):
            if why := complaint(file, name):
                found.append(f"{file}:{line}: {name}: {why}")
    return found


def test_the_rooms_keep_their_order() -> None:
    assert len(list(python_files(ROOT))) >= len(MAY_IMPORT) - 1  # it did look at something
    assert not (found := violations(ROOT)), "\n".join(found)


BAD = [
    ("kvpolicies/a.py", "from kvpolicies.beacon import fps", "may not import beacon"),
    ("kvpolicies/a.py", "import kvpolicies.learned.scorer", "may not import learned"),
    ("kvpolicies/a.py", "from kvpolicies import eval", "may not import eval"),
    ("kvpolicies/a.py", "import kvpolicies\nkvpolicies.beacon.fps()", "may not import beacon"),
    ("kvpolicies/a.py", "def f():\n    from kvpolicies.beacon.fps import fps", "beacon"),
    ("kvpolicies/a.py", "import importlib\nimportlib.import_module('kvpolicies.eval')", "eval"),
    ("kvpolicies/a.py", "TABLE = {'x': 'kvpolicies.beacon.policy:Beacon'}", "beacon"),
    ("kvpolicies/cli.py", "import importlib\nimportlib.import_module('kvpolicies.eval')", "eval"),
    ("kvpolicies/sub/a.py", "import kvpolicies.train", "may not import train"),
    ("beacon/a.py", "import kvpolicies.learned", "may not import learned"),
    ("learned/a.py", "from kvpolicies.beacon import x", "may not import beacon"),
    ("beacon/a.py", "import kvpolicies.eval", "may not import eval"),
    (
        "eval/study/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvpolicies.train",
        "",
    ),
    ("kernels/a.py", "import numpy", "torch, triton"),
    ("kernels/a.py", "from kvpolicies.budget import Budget", "may not import kvpolicies"),
    ("eval/study/a.py", "from kvpolicies.eval.report import x", "its report"),
    ("eval/tasks/a.py", "def f(x: 'kvpolicies.eval.study.config'): ...", "its study"),
    ("eval/select/a.py", "import kvpolicies.eval.bench.run", "its bench"),
    ("eval/stats/a.py", "from kvpolicies.eval import sandbox", "its sandbox"),
    ("eval/loose.py", "import kvpolicies.eval.stats", "no room loose"),
    ("eval/a.py", "from . import b", "relative"),
    ("eval/a.py", "import kernels", "bare name"),
    ("eval/a.py", "from train.data import x", "bare name"),
    ("kvpolicies/a.py", "from transformers.cache_utils import Cache", "internals"),
    ("kvpolicies/cache.py", "from transformers.masking_utils import x", "internals"),
    ("kvpolicies/a.py", "from transformers import masking_utils", "internals"),
    ("kvpolicies/a.py", "import transformers\ntransformers.masking_utils.x()", "internals"),
    ("eval/a.py", "import transformers.models.llama", "internals"),
    ("eval/a.py", "import lightning", "train/"),
    ("learned/a.py", "from xlstm.blocks import x", "learned/scorer.py"),
]

GOOD = [
    ("kernels/a.py", "import math, torch\nimport triton.language as tl"),
    ("kernels/a.py", "from kvpolicies.kernels.b import f"),
    (
        "kvpolicies/a.py",
        "from kvpolicies.kernels.b import f\nfrom kvpolicies.errors import UserError",
    ),
    ("kvpolicies/a.py", '"""See kvpolicies.eval.commands.compare for the study."""'),
    (
        "kvpolicies/a.py",
        "import transformers\nfrom transformers import Cache\ntransformers.__version__",
    ),
    ("kvpolicies/adapter.py", "from transformers.masking_utils import x"),
    ("kvpolicies/cache.py", "from transformers.cache_utils import CacheLayerMixin"),
    ("kvpolicies/registry.py", "TABLE = {'beacon': 'kvpolicies.beacon.policy:Beacon'}"),
    ("kvpolicies/registry.py", "GROUP = 'kvpolicies.policies'"),
    ("kvpolicies/cli.py", "COMMANDS = {'compare': 'kvpolicies.eval.commands.compare:COMMAND'}"),
    (
        "kvpolicies/cli.py",
        "COMMANDS = {'compare': ('kvpolicies.eval.commands.compare', 'the main job')}",
    ),
    ("beacon/a.py", "import kvpolicies.policy"),
    ("eval/a.py", "import kvpolicies.beacon.fps, kvpolicies.learned.scorer"),
    ("eval/commands/a.py", "from kvpolicies.eval.report import x"),
    ("eval/report/a.py", "import kvpolicies.eval.report.b, kvpolicies.eval.study.c"),
    ("train/a.py", "import lightning, kvpolicies.eval.tasks.ledger"),
    ("learned/scorer.py", "import xlstm"),
]


def _tree(root: Path, file: str, source: str) -> Path:
    path = root / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return root


@pytest.mark.parametrize(("file", "source", "why"), BAD)
def test_a_tree_out_of_order_is_named(tmp_path: Path, file: str, source: str, why: str) -> None:
    found = violations(_tree(tmp_path, file, source))
    assert found and found[0].startswith(f"{file}:") and why in found[0]


@pytest.mark.parametrize(("file", "source"), GOOD)
def test_a_tree_in_order_passes(tmp_path: Path, file: str, source: str) -> None:
    assert violations(_tree(tmp_path, file, source)) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    """The same file seen through kvpolicies/eval would be judged as kvpolicies' own."""
    _tree(tmp_path, "eval/a.py", "import kvpolicies.beacon")
    (tmp_path / "kvpolicies").mkdir()
    (tmp_path / "kvpolicies" / "eval").symlink_to("../eval")
    assert violations(tmp_path) == []
