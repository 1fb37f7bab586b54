"""Policies by name: a table of strings for ours, entry points for other people's.

A spec such as `beacon(n_beacon=8, pool="mean")` names a policy and its options; it is the command
line's argument, the YAML value, the row label, and what `str(policy)` gives back.
"""

import ast
import importlib
from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib.metadata import entry_points
from math import isfinite
from typing import Any, get_type_hints

from kvpolicies.errors import UserError, nearest

GROUP = "kvpolicies.policies"

POLICIES = {
    "full": "kvpolicies.baselines.full:Full",
    "random": "kvpolicies.baselines.random:Random",
    "streaming": "kvpolicies.baselines.streaming:Streaming",
    "tova": "kvpolicies.baselines.tova:Tova",
    "h2o": "kvpolicies.baselines.h2o:H2O",
    "snapkv": "kvpolicies.baselines.snapkv:SnapKV",
    "rpc": "kvpolicies.baselines.rpc:RPC",
    "rkv": "kvpolicies.baselines.rkv:RKV",
    "keydiff": "kvpolicies.baselines.keydiff:KeyDiff",
    "lazy": "kvpolicies.baselines.lazy:Lazy",
    "oracle": "kvpolicies.baselines.oracle:Oracle",
    "beacon": "kvpolicies.beacon.policy:Beacon",
    "kvpop": "kvpolicies.learned.kvpop:KVpop",
    "kvpop_mlp": "kvpolicies.learned.kvpop:KVpopMLP",
    "dms": "kvpolicies.learned.dms:DMS",
    "trimkv": "kvpolicies.learned.trimkv:TrimKV",
}


# What an option of a type may be, and how to say so.
KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda v: isinstance(v, bool), "True or False"),
    int: (lambda v: isinstance(v, int) and not isinstance(v, bool), "a whole number"),
    float: (
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v),
        "a finite number",
    ),
    str: (lambda v: isinstance(v, str), "text in quotes"),
}


def policy_names() -> list[str]:
    """All known names, ours first, in table order."""
    return list(_table())


def resolve(spec: Any) -> Any:
    """The policy that a spec describes; a `Policy` is returned as it is.

    Raises:
        ValueError: for an unknown name or option (naming the nearest), or a bad value.
    """
    if not isinstance(spec, str):
        return spec
    name, options = parse_spec(spec)
    table = _table()
    if name not in table:
        raise UserError(f"unknown policy {name!r}: {nearest(name, list(table))}")
    cls = load(table[name])
    _check_options(name, cls, options)
    return cls(**options)


def _check_options(name: str, cls: Any, options: dict[str, Any]) -> None:
    known, kinds = [f.name for f in fields(cls)], get_type_hints(cls)
    for option, value in options.items():
        if option not in known:
            hint = nearest(option, known) if known else "it has no options"
            raise UserError(f"policy {name}: unknown option {option!r}: {hint}")
        wanted = KINDS.get(kinds[option])
        if wanted and not wanted[0](value):
            raise UserError(f"policy {name}: {option} must be {wanted[1]}, got {value!r}")


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """`"rkv(mix=0.2)"` -> `("rkv", {"mix": 0.2})`; values are Python literals."""
    try:
        node = ast.parse(spec.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Name)
            or _positional(node)
        ):
            raise ValueError
        options = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        if len(options) < len(node.keywords):
            raise UserError(f"policy {spec!r}: an option is given twice")
        return node.func.id, options
    except UserError:
        raise
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise UserError(
            f"policy {spec!r}: expected a name, or a name with options such as "
            "beacon(n_beacon=8, n_recent=8)"
        ) from None


def _positional(call: ast.Call) -> bool:
    """Whether anything is passed without its name, `**` included."""
    return bool(call.args) or any(k.arg is None for k in call.keywords)


def describe() -> list[tuple[str, str, str, str]]:
    """(name, one line, source, options with defaults) of every policy."""
    rows = []
    for name, target in _table().items():
        cls = load(target)
        line = (cls.__doc__ or "").strip().splitlines()[0]
        options = ", ".join(
            f"{f.name}={f.default!r}" if f.default is not MISSING else f.name for f in fields(cls)
        )
        rows.append((name, line, cls.source, options))
    return rows


def load(target: str) -> Any:
    """The object behind `"module:Name"`."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _table() -> dict[str, str]:
    # Ours last: a package cannot silently replace a policy that published tables name.
    others = {e.name: e.value for e in entry_points(group=GROUP) if e.name not in POLICIES}
    return {**POLICIES, **others}
