"""Where a study's numbers come from: what ran, on what, and the command that repeats it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvpolicies.eval.study.config import Study

AGAIN = "results/again"
CHANGED = "+changes"


def command(record: Mapping[str, Any]) -> str:
    """The command line that runs run.json's study again, into a folder of its own."""
    asked = record["study"]
    words = ["kvpolicies", "compare"]
    for field in fields(Study):
        value = asked.get(field.name, field.default)
        if value is None or field.name == "out" or _plain(value) == _plain(field.default):
            continue
        text = ",".join(value) if isinstance(value, list | tuple) else str(value)
        flag = "--" + field.name.replace("_", "-")
        words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return shlex.join([*words, "--out", AGAIN])


def commands(record: Mapping[str, Any]) -> list[str]:
    """The lines of a shell that repeat a study: its commit if it is known, threads, the command."""
    here = record["environments"][0] if record.get("environments") else {}
    commit = str(here.get("commit") or "").removesuffix(CHANGED)
    threads = f"OMP_NUM_THREADS={here['threads']} " if here.get("threads") else ""
    return [*([f"git checkout {commit}"] if commit else []), threads + command(record)]


def changed(record: Mapping[str, Any]) -> bool:
    """Whether any of it ran on code that was not committed."""
    found = [str(here.get("commit") or "") for here in record.get("environments", [])]
    return any(commit.endswith(CHANGED) for commit in found)


def environments(record: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """A line a fact: (its name, its value in each environment)."""
    flat = [_flat(here) for here in record.get("environments", [])]
    names = list(dict.fromkeys(name for here in flat for name in here))
    return [(name, [_said(here.get(name)) for here in flat]) for name in names]


def facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The model and the problems, as run.json has them."""
    model = [(name.replace("_", " "), _said(value)) for name, value in record["model"].items()]
    return [*model, ("problems", _said(record.get("problems"))),
            ("fingerprint of the problems", _said(record.get("problems_fingerprint"))),
            ("seed", _said(record["study"].get("seed")))]  # fmt: skip


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _flat(here: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in here.items():
        flat.update(value if isinstance(value, Mapping) else {name: value})
    return flat


def _said(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
