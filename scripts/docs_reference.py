"""Reference pages made from the program itself: commands, YAML files, policies, with every option.

Texts are those of `--help`, of the configs' fields, and of the policies' own docstrings, so that
nothing is written twice. Needs the package, and nothing of mkdocs.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any, get_type_hints

from kvpolicies.cli import COMMANDS, parser_of
from kvpolicies.registry import POLICIES, load

FILES = {
    "A deployment": (
        "kvpolicies.config:Deployment",
        "Read by `generate`, `serve`, `bench` and, against `full`, `compare`; written by `select`.",
    ),
    "A study": ("kvpolicies.eval.study.config:Study", "Read by `compare`."),
    "A task": (
        "kvpolicies.eval.tasks.task:Task",
        "Named by a study's `task`. `base: NAME` begins with the keys of a task of the package.",
    ),
    "A task's hub": ("kvpolicies.eval.tasks.hub:Hub", "Under a task's key `hub`."),
    "A task's columns": ("kvpolicies.eval.tasks.problems:Columns", "Under a task's key `columns`."),
    "A task's sandbox": ("kvpolicies.eval.sandbox.running:Limits", "Under a task's key `sandbox`."),
    "A recipe": ("kvpolicies.train.recipe:Recipe", "Read by `train`."),
    "An analysis of revisits": ("kvpolicies.eval.revisit.config:Revisit", "Read by `revisit`."),
}
"""Every kind of YAML file: its title, its dataclass, who reads it."""

DECLARED = {
    "needs_attention": "reads attention weights",
    "needs_input": "reads the attention's inputs",
    "needs_future": "looks ahead: cannot be deployed",
    "mixes_heads": "looks at a layer's heads together",
    "needs_rope": "rotates queries or keys itself",
}
"""What a policy says of itself, in words."""

# The heading lies below the depth of the table of contents, where the name stands already; options
# have a table of their own.
AS_POLICY = """
      heading_level: 4
      members: false
      merge_init_into_class: false
      show_bases: false"""


def commands() -> str:
    """Markdown: every command with its arguments and options."""
    return "\n\n".join(_command(name) for name in COMMANDS)


def files() -> str:
    """Markdown: every kind of YAML file with its keys."""
    parts = []
    for title, (target, text) in FILES.items():
        cls = load(target)
        hints = get_type_hints(cls)
        rows = [
            (f"`{f.name}`", _kind(hints[f.name]), _default(f), f.metadata.get("help", ""))
            for f in fields(cls)
            if not is_dataclass(hints[f.name])  # has a table of its own
        ]
        heads = ("key", "type", "default", "meaning")
        parts.append(f"## {title}\n\n{text} [`{cls.__name__}`][{_path(target)}].\n")
        parts.append(_table(heads, [(*row[:3], row[3].replace("%%", "%")) for row in rows]))
    return "\n".join(parts)


def policies() -> str:
    """Markdown: every policy of the package with its options, and its class."""
    parts = []
    for name, target in POLICIES.items():
        cls = load(target)
        declared = [words for flag, words in DECLARED.items() if getattr(cls, flag) is True]
        parts.append(f"## `{name}`\n\nSource: {cls.source}." + _sentence(declared))
        parts.append(f"::: {_path(target)}\n    options:{AS_POLICY}")
        rows = [(f"`{name}`", default, text) for name, default, text in options(cls)]
        if rows:
            parts.append(_table(("option", "default", "meaning"), rows))
    return "\n\n".join(parts)


def options(cls: type) -> list[tuple[str, str, str]]:
    """(name, default, the sentence under the field) of a policy's options."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        texts |= _field_texts(base)
    return [(f.name, _default(f), texts.get(f.name, "")) for f in fields(cls)]


def _field_texts(cls: type) -> dict[str, str]:
    """The strings that stand under a class's annotated fields."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            constant = text.value if isinstance(text, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                found[field.target.id] = inspect.cleandoc(constant.value)
    return found


def _command(name: str) -> str:
    parser = parser_of(name)
    summary = COMMANDS[name][1]
    parts = [f"## `{name}`", summary[0].upper() + summary[1:] + "."]
    # Without COLUMNS argparse would ask the terminal.
    usage = parser.format_usage().removeprefix("usage: ").split()
    positional = [a for a in parser._actions if not a.option_strings]
    parts.append(f"`{' '.join([*usage[:2], '[options]', *(_called(a) for a in positional)])}`")
    shown = [text for text in (parser.description, parser.epilog) if text and text != summary]
    parts += [f"```text\n{text.strip()}\n```" for text in shown]
    rows = [
        (f"`{_called(action)}`", _help(parser, action))
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    ]
    if rows:
        parts.append(_table(("option", "meaning"), rows))
    return "\n\n".join(parts)


def _called(action: argparse.Action) -> str:
    """How an argument is written: `--steps STEPS`, `[config]`."""
    if action.option_strings:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        return action.option_strings[-1] + value
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "+": f"{name} ...", "*": f"[{name} ...]"}.get(str(action.nargs), name)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _kind(hint: Any) -> str:
    if isinstance(hint, type) and not getattr(hint, "__args__", None):
        return hint.__name__
    words = str(hint).replace("typing.", "")
    return words.replace(", ...]", "]").replace("tuple[", "list[").replace(" | None", "")


def _default(field: Any) -> str:
    if field.default is MISSING or field.default is None or field.default in ("", ()):
        return ""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"


def _path(target: str) -> str:
    return target.replace(":", ".")


def _sentence(declared: list[str]) -> str:
    return f" It {', '.join(declared)}." if declared else ""


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; what would end a cell is escaped."""
    lines = [list(heads), ["---"] * len(list(heads)), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("{{", "&#123;&#123;")


PARTS: dict[str, Callable[[], str]] = {"commands": commands, "files": files, "policies": policies}
"""What can be made, by the names of the marks in docs/reference."""
