"""What lies where, and how long it may be: the rules of the house that a machine can check."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("kernels", "beacon", "learned", "eval", "train")
FOLDERS = {"kvpolicies", *LINKS, "tests"}
FILES = {
    ".ci",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "mkdocs.yml",
    "pyproject.toml",
}
OPTIONAL = {"docs", "scripts"}

# Written so that these very lines do not match.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|farm|home|root|tmp/w)/")


def tracked() -> list[str]:
    """Paths that git tracks, relative to the root; skips the test outside a checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [path for path in out.split("\0") if path and (ROOT / path).exists()]


def python_files() -> list[Path]:
    found = []
    for top in sorted(FOLDERS | OPTIONAL):
        for folder, _, names in os.walk(ROOT / top, followlinks=False):
            found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    assert found
    return found


@pytest.mark.parametrize("name", LINKS)
def test_each_room_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "kvpolicies" / name
    assert link.is_symlink(), f"kvpolicies/{name} must be a link (git config core.symlinks true?)"
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name and link.is_dir()


def test_kernels_is_no_package_of_its_own() -> None:
    """With an __init__.py, transformers would take ./kernels for Hugging Face's package."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("name", [*LINKS[1:], "kvpolicies"])
def test_the_other_rooms_are_packages(name: str) -> None:
    assert (ROOT / name / "__init__.py").is_file()


def test_tests_need_no_path_tricks() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not (ROOT / "conftest.py").exists()


def test_top_level_holds_exactly_the_agreed_entries() -> None:
    top = {path.split("/")[0] for path in tracked()}
    assert top - OPTIONAL == FOLDERS | FILES


def test_long_files_are_named() -> None:
    """A warning: a file is split where a thought ends, never to pass a count."""
    for path in python_files():
        if (n := _lines(path)) > 300:
            warnings.warn(f"{path.relative_to(ROOT)}: {n} lines", stacklevel=1)


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_long_functions_are_named() -> None:
    """A warning. The body counts: signature and docstring are the contract.

    Kernels are exempt: a GPU program is one function by nature.
    """
    long = {}
    for path in python_files():
        if path.relative_to(ROOT).parts[0] == "kernels":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                if lines > 50:
                    long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    if long:
        warnings.warn(f"functions of more than 50 lines: {long}", stacklevel=1)


def test_no_file_is_called_utils() -> None:
    assert not [path for path in python_files() if path.name == "utils.py"]


def test_no_text_names_a_path_of_some_machine() -> None:
    hits = []
    for path in tracked():
        if (ROOT / path).is_symlink():
            continue
        text = (ROOT / path).read_bytes().decode("utf-8", errors="ignore")
        hits += [f"{path}: {m.group()}" for m in MACHINE_PATH.finditer(text)]
    assert not hits, "\n".join(hits)


PURE = """
import sys
before = set(sys.modules)
import kvpolicies
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
"""


def test_importing_the_package_imports_nothing_heavy() -> None:
    command = [sys.executable, "-W", "error", "-c", PURE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kvpolicies"]
    assert done.stderr == ""


def test_shapes_in_signatures_are_checked_in_tests(pytestconfig: pytest.Config) -> None:
    hooked = str(pytestconfig.getoption("jaxtyping_packages"))
    for path in (ROOT / "kvpolicies").glob("*.py"):
        if "from jaxtyping import" in path.read_text(encoding="utf-8"):
            assert f"kvpolicies.{path.stem}," in hooked, f"pyproject.toml does not name {path.name}"


def test_links_in_prose_lead_somewhere() -> None:
    for page in [path for path in tracked() if path.endswith(".md")]:
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (folder / target).exists(), f"{page} links to {target}"


SOURCES = ("kernels", "kvpolicies", "beacon", "learned", "eval", "train")


def parsed() -> list[tuple[str, ast.Module]]:
    """(path, syntax tree) of the package's own files."""
    files = [path.relative_to(ROOT) for path in python_files()]
    sources = [path for path in files if path.parts[0] in SOURCES]
    return [(str(path), ast.parse((ROOT / path).read_text(encoding="utf-8"))) for path in sources]


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, str] = {}
    twice = []
    for path, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                if node.name in found:
                    twice.append(f"{node.name}: {found[node.name]} and {path}")
                found[node.name] = path
    assert found and not twice, "\n".join(twice)


def test_a_docstring_stands_alone() -> None:
    """The site prints each by itself: "The same of rows" says nothing there."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    leaning = []
    for path, tree in parsed():
        for node in ast.walk(tree):
            if not isinstance(node, kinds):
                continue
            text = ast.get_docstring(node)
            if text and text.startswith(("The same", "As ", "Of ", "See ")):
                leaning.append(f"{path}: {node.name}: {text.splitlines()[0]}")
    assert not leaning, "\n".join(leaning)
