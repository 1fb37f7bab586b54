"""The documentation holds what the build of the site does not check: nothing public is left out of
the reference, links hold as GitHub follows them, and docstrings say what may be raised."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import kvpolicies
from kvpolicies.cli import COMMANDS, parser_of
from kvpolicies.registry import POLICIES, load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)")
ROOMS = "kernels|kvpolicies|beacon|learned|eval|train|scripts|tests"
NAMED = re.compile(rf"`(?=\w+/|::)((?:(?:{ROOMS})/[\w/]+\.(?:py|yaml))?)(?:::(test_\w+))?[\[`]")
"""Files of the repository, and tests: `eval/x.py`, `eval/test_x.py::test_y`, `::test_z`."""
RAISED = re.compile(r"\braise (?!NotImplementedError)\w")


@cache
def reference() -> Any:
    """The module that makes pages from the program."""
    file = ROOT / "scripts" / "docs_reference.py"
    spec = importlib.util.spec_from_file_location("docs_reference", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def listed() -> dict[str, str]:
    """{documented name: page} of the reference."""
    found = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert name not in found, f"{name} stands in {found[name]} and in {page.name}"
            found[name] = page.name
    return found


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The headings' ids as GitHub makes them; of pages made when the site is built, theirs too."""
    text = prose(page)
    if page.parent.name == "reference":
        for mark, make in reference().PARTS.items():
            text = text.replace(f"<!-- {mark} -->", make())
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in pages():
        for target, anchor in LINK.findall(prose(page)):
            to = (page.parent / target).resolve() if target else page
            if not to.exists() or (anchor and anchor not in anchors(to)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken, "\n".join(broken)


def test_files_and_tests_that_pages_name_exist() -> None:
    missing = []
    for page in [page for page in pages() if page.name != "CONTRIBUTING.md"]:  # an example's file
        file = ""
        for path, test in re.findall(NAMED, page.read_text(encoding="utf-8")):
            file = path or file
            at = next((p for p in (ROOT / file, ROOT / "tests" / file) if p.is_file()), None)
            if not at or (test and f"def {test}(" not in at.read_text(encoding="utf-8")):
                missing.append(f"{page.relative_to(ROOT)}: {file} {test}")
    assert not missing, "\n".join(missing)


def test_every_page_is_in_the_navigation() -> None:
    def leaves(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        for value in node if isinstance(node, list) else getattr(node, "values", list)():
            yield from leaves(value)

    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = text.split("\nnav:")[1].split("\nnot_in_nav")[0]  # the rest has tags of mkdocs' own
    named = set(leaves(yaml.safe_load(nav))) - {"overview.md", "contributing.md"}
    assert named == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_every_public_name_is_in_the_reference() -> None:
    missing = [name for name in kvpolicies.__all__ if f"kvpolicies.{name}" not in listed()]
    assert not missing


def test_every_command_is_listed_with_every_option() -> None:
    text = reference().commands()
    for name in COMMANDS:
        section = text.split(f"## `{name}`\n")[1].split("\n## ")[0]
        for action in parser_of(name)._actions:
            for option in (o for o in action.option_strings if o not in ("-h", "--help")):
                assert re.search(rf"^\| `{option}\b", section, re.MULTILINE), (name, option)


def test_every_policy_is_listed_with_every_option_and_its_meaning() -> None:
    text = reference().policies()
    for name, target in POLICIES.items():
        section = text.split(f"## `{name}`\n")[1].split("\n## ")[0]
        assert f"::: {target.replace(':', '.')}\n" in section
        for option, default, meaning in reference().options(load(target)):
            assert meaning, f"{name}: {option} has no sentence under it"
            assert f"| `{option}` | {default} | {meaning.split()[0]}" in section, (name, option)


def test_every_key_of_yaml_files_has_a_meaning() -> None:
    assert " |  |\n" not in reference().files()


def node_of(name: str) -> ast.ClassDef | ast.FunctionDef:
    """The definition of a documented name, read from its file."""
    path = name.removeprefix("kvpolicies.").split(".")
    if len(path) == 1:
        path = [kvpolicies._PUBLIC[path[0]], *path]
    module = ROOT.joinpath("kvpolicies", *path[:-1])
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == path[-1]:
            return node
        if isinstance(node, ast.ImportFrom) and path[-1] in [a.name for a in node.names]:
            return node_of(f"{node.module}.{path[-1]}")
    raise AssertionError(f"{name}: not in {file.relative_to(ROOT)}")


def faults(name: str) -> Iterator[str]:
    """What a documented name's docstrings leave unsaid."""
    node = node_of(name)
    parts = [(name, node)]
    if isinstance(node, ast.ClassDef):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        parts += [(f"{name}.{m.name}", m) for m in methods if not m.name.startswith("_")]
        yield from unexplained_fields(name, node)
        made = [m for m in methods if m.name in ("__init__", "__post_init__")]
        raises = any(RAISED.search(ast.unparse(m)) for m in made) and not is_config(node)
        if raises and "Raises" not in (ast.get_docstring(node) or ""):
            yield f"{name}: raises when it is made, and does not say so"
    for label, part in parts:
        text = ast.get_docstring(part) or ""
        raises = isinstance(part, ast.FunctionDef) and RAISED.search(ast.unparse(part))
        if not text:
            yield f"{label}: no docstring"
        elif raises and "Raises" not in text:
            yield f"{label}: raises, and does not say so"


def is_config(node: ast.ClassDef) -> bool:
    """Whether fields are explained by `config.option`; docs/reference/files.md lists them."""
    return "option(" in ast.unparse(node)


def unexplained_fields(name: str, node: ast.ClassDef) -> Iterator[str]:
    """Fields without a sentence under them, whose names do not stand in the class's own text."""
    told = ast.get_docstring(node) or ""
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or is_config(node):
            continue
        label = ast.unparse(field.target)
        says = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if not (says or label.startswith("_") or f"`{label}`" in told):
            yield f"{name}.{label}: no sentence under it, and not in the class's text"


def test_public_docstrings_say_what_is_raised_and_what_fields_hold() -> None:
    said = [fault for name in listed() for fault in faults(name)]
    assert not said, "\n".join(said)


def test_the_picture_shows_the_figures_of_the_study() -> None:
    """Cheap: what is drawn of kept tokens is made anew by scripts/kept_picture.py alone."""
    picture = (DOCS / "kept.svg").read_text(encoding="utf-8")
    table = (DOCS / "study.md").read_text(encoding="utf-8")
    names = re.findall(r'class="name">(\w+)<', picture)
    shares = re.findall(r">(\d+) %<", picture)
    assert len(names) == len(shares) == 7
    for name, share in zip(names, shares, strict=True):
        budget = "–" if name == "full" else "133"
        assert f"| {name} | {budget} | {share} (" in table
    assert len(picture) < 150_000
