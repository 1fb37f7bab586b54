"""Policies by name: a table of strings for ours, entry points for other people's.

A spec such as `beacon(n_beacon=8, pool="mean")` names a policy and its options; it is the command
line's argument, the YAML value, the row label, and what `str(policy)` gives back.
"""

import ast
import importlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from math import isfinite
from typing import Any

from kvpolicies.errors import UserError, first_line, nearest, shown
from kvpolicies.outline import outline_of, read
from kvpolicies.streams import say

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
    "expected": "kvpolicies.baselines.expected:Expected",
    "raas": "kvpolicies.baselines.raas:RaaS",
    "gkv": "kvpolicies.baselines.gkv:GKV",
    "vase": "kvpolicies.baselines.vase:VaSE",
    "criticalkv": "kvpolicies.baselines.criticalkv:CriticalKV",
    "dropkv": "kvpolicies.baselines.dropkv:DropKV",
    "longflow": "kvpolicies.baselines.longflow:LongFlow",
    "triattention": "kvpolicies.learned.triattention:TriAttention",
    "oracle": "kvpolicies.baselines.oracle:Oracle",
    "beacon": "kvpolicies.beacon.policy:Beacon",
    "kvpop": "kvpolicies.learned.kvpop:KVpop",
    "kvpop_mlp": "kvpolicies.learned.kvpop:KVpopMLP",
    "dms": "kvpolicies.learned.dms:DMS",
    "trimkv": "kvpolicies.learned.trimkv:TrimKV",
    "kvzap": "kvpolicies.learned.kvzap:KVzap",
    "fastkvzip": "kvpolicies.learned.fastkvzip:FastKVzip",
}

ON_REQUEST = ("expected", "raas", "gkv", "vase", "criticalkv", "dropkv", "longflow", "triattention",
              "kvzap", "fastkvzip")  # fmt: skip
"""Those of ours that a study runs when they are asked for, or all are."""


QUOTAS = ("ams",)
"""What `quota` may be, an option of every policy (quota.py)."""

# What an option of a type may be, and how to say so.
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda v: isinstance(v, bool), "True or False"),
    "int": (lambda v: isinstance(v, int) and not isinstance(v, bool), "a whole number"),
    "float": (
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v),
        "a finite number",
    ),
    "str": (lambda v: isinstance(v, str), "text in quotes"),
}


def policy_names() -> list[str]:
    """All known names, ours first, in table order."""
    return list(_table())


def usable_names() -> list[str]:
    """The known names but those of packages that cannot be imported; each of these is told once."""
    return [name for name, target in _table().items() if name in POLICIES or _imports(name, target)]


def check(spec: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of a spec whose name and options there are; nothing heavy is imported.

    What values of the right type an option cannot have, only its class knows: `resolve` tells.

    Raises:
        ValueError: for an unknown name or option (naming the nearest), or a value of a wrong type.
    """
    name, options = parse_spec(spec)
    table = _table()
    if name not in table:
        raise UserError(f"unknown policy {shown(name)}: {nearest(name, list(table))}")
    quota = options.get("quota", "ams")
    if quota not in QUOTAS:
        raise UserError(f"policy {name}: quota must be {' or '.join(QUOTAS)}, got {shown(quota)}")
    known = (read(table[name]) or outline_of(_loaded(name, table[name]))).options
    for option, value in options.items():
        if option == "quota":
            continue
        if option not in known:
            hint = nearest(option, list(known)) if known else "it has no options"
            raise UserError(f"policy {name}: unknown option {shown(option)}: {hint}")
        wanted = KINDS.get(known[option].kind)
        if wanted and not wanted[0](value):
            raise UserError(f"policy {name}: {option} must be {wanted[1]}, got {shown(value)}")
    return name, options


def resolve(spec: Any) -> Any:
    """The policy that a spec describes; a `Policy` is returned as it is.

    Raises:
        ValueError: for an unknown name or option (naming the nearest), or a bad value.
    """
    if not isinstance(spec, str):
        return spec
    name, options = check(spec)
    quota = options.pop("quota", None)
    policy = _loaded(name, _table()[name])(**options)
    return load("kvpolicies.quota:MassQuota")(base=policy) if quota else policy


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
            raise UserError(f"policy {shown(spec)}: an option is given twice")
        return node.func.id, options
    except UserError:
        raise
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise UserError(
            f"policy {shown(spec)}: expected a name, or a name with options such as "
            "beacon(n_beacon=8, n_recent=8)"
        ) from None


def _positional(call: ast.Call) -> bool:
    """Whether anything is passed without its name, `**` included."""
    return bool(call.args) or any(k.arg is None for k in call.keywords)


def describe() -> list[tuple[str, str, str, str]]:
    """(name, one line, source, options with defaults) of every policy that can be imported."""
    rows = []
    for name in usable_names():
        target = _table()[name]
        told = read(target) or outline_of(_loaded(name, target))
        rows.append((name, told.line, told.source, told.signature))
    return rows


def load(target: str) -> Any:
    """The object behind `"module:Name"`."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _table() -> dict[str, str]:
    # Ours last: a package cannot silently replace a policy that published tables name.
    others = {e.name: e.value for e in entry_points(group=GROUP) if e.name not in POLICIES}
    return {**POLICIES, **others}


def _loaded(name: str, target: str) -> Any:
    """A policy's class.

    Raises:
        UserError: another package's, that cannot be imported, or is none.
    """
    if name in POLICIES:
        return load(target)
    try:
        cls: Any = load(target)
        outline_of(cls)
    except (Exception, SystemExit) as error:  # other people's code, which may do anything
        raise UserError(
            f"policy {name}: {target} of another package cannot be imported "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    return cls


@cache
def _imports(name: str, target: str) -> bool:
    """Whether another package's policy can be had; if not, it says so."""
    try:
        _loaded(name, target)
    except UserError as error:
        say(f"{error}; skipped")
        return False
    return True
