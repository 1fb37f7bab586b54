"""A policy's options, read from its source: importing a policy imports torch, which takes seconds.

Only plain classes are read so, as ours are: the defaults of options are literals or names of
constants.
Whatever else there may be has to be imported (registry.py).
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicies.files import read_text

_ROOT = "kvpolicies."


class Option(NamedTuple):
    """One option of a policy."""

    kind: str
    """Name of its type: bool, int, float, str."""
    default: Any
    """MISSING where one must be given."""


@dataclass(frozen=True)
class Outline:
    """What a policy says of itself."""

    line: str
    """The first of its docstring."""
    source: str
    """Paper or origin."""
    options: dict[str, Option]

    @property
    def signature(self) -> str:
        """Options with their defaults, as `policies` lists them."""
        listed = (
            name if option.default is MISSING else f"{name}={option.default!r}"
            for name, option in self.options.items()
        )
        return ", ".join(listed)


class _Unreadable(Exception):
    """Source that is more than options and literals."""


def read(target: str) -> Outline | None:
    """The outline of the class behind "module:Class", if it can be read without importing it.

    None for what is imported already, lies in another package, or is more than options with
    literal defaults.
    """
    module, _, name = target.partition(":")
    if module in sys.modules or not module.startswith(_ROOT):
        return None
    try:
        where, node = _class(module, name)
        text = ast.get_docstring(node)
        if not text:
            return None
        return Outline(text.splitlines()[0], _source(where, node), dict(_options(where, node)))
    except (_Unreadable, SyntaxError):
        return None


def outline_of(cls: Any) -> Outline:
    """The outline of a class that is imported."""
    options = {
        f.name: Option(f.type if isinstance(f.type, str) else _name(f.type), f.default)
        for f in fields(cls)
    }
    return Outline((cls.__doc__ or "").strip().splitlines()[0], cls.source, options)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


@cache
def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise _Unreadable
    return ast.parse(read_text(Path(spec.origin)))


def _class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """A class and the module that defines it."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    return _class(*_imported(module, name))


def _imported(module: str, name: str) -> tuple[str, str]:
    """From which module `name` comes, and what it is called there."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_ROOT):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    raise _Unreadable


def _bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    for base in node.bases:
        if not isinstance(base, ast.Name):
            raise _Unreadable
        yield _class(module, base.id)


def _options(module: str, node: ast.ClassDef) -> Iterator[tuple[str, Option]]:
    """Those of the bases first, as a dataclass has them."""
    for where, base in _bases(module, node):
        yield from _options(where, base)
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        kind = ast.unparse(item.annotation)
        if not kind.startswith("ClassVar"):
            default = MISSING if item.value is None else _value(module, item.value)
            yield item.target.id, Option(kind, default)


def _source(module: str, node: ast.ClassDef) -> str:
    for item in node.body:
        if isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None:
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            if any(isinstance(target, ast.Name) and target.id == "source" for target in targets):
                return _value(module, item.value)
    for where, base in _bases(module, node):
        return _source(where, base)
    raise _Unreadable


def _value(module: str, node: ast.expr) -> Any:
    """What an expression says: a literal, the name of a constant, or the default of an `option`."""
    if isinstance(node, ast.Name):
        return _constant(module, node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option":
        return _value(module, node.args[0])
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _Unreadable from None


def _constant(module: str, name: str) -> Any:
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return _value(module, node.value)
    return _constant(*_imported(module, name))
