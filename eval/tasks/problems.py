"""Problems: one JSON object each, from a file or from the hub, checked before anything runs.

A field is read from the column that the task names for it, else from the column of its own name; so
a task takes the hub's rows and JSON lines with `id`, `problem`, `answer` alike. A column may lie
inside another: `metadata.func_name` looks into `metadata`, be it an object or JSON text.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.eval.tasks import code_tests
from kvpolicies.eval.tasks import ledger as ledgers
from kvpolicies.files import parse_json, read_lines
from kvpolicies.options import option


@dataclass(frozen=True)
class Columns:
    """Which column holds which field."""

    id: str = option("id", "a name of its own for each problem; rows of the hub may lack it")
    problem: str = option("problem", "what is asked")
    answer: str = option("answer", "the right answer (of choices: its text)")
    solution: str = option("solution", "a worked solution, which fidelity feeds")
    choices: tuple[str, ...] = option(
        ("choices",), "columns of the other choices, or one column with a list of them"
    )
    tests: tuple[str, ...] = option(("tests",), "columns with tests of code, each with a list")
    starter: str = option("starter", "code that the answer starts from")
    function: str = option("function", "name of the function that tests call; else a program")


@dataclass(frozen=True)
class Problem:
    """One problem, as it is asked.

    `id` names it in rows, `text` is the whole turn of the user, `answer` the right one (of choices:
    its letter). `solution` is what is forced (fidelity); `ledger` is set for ledger problems;
    `choices` are in the order shown; `tests`, `starter` and `function` belong to answers in code.
    `rule` is whatever else decides a grade, for the fingerprint.
    """

    id: str
    text: str
    answer: str
    solution: str = ""
    ledger: ledgers.LedgerProblem | None = None
    choices: tuple[str, ...] = ()
    tests: tuple[code_tests.Test, ...] = ()
    starter: str = ""
    function: str = ""
    rule: str = ""


def read_problems(
    path: str | Path, keys: Sequence[str], limit: int | None, columns: Columns | None = None
) -> list[Problem]:
    """The first `limit` problems of a JSON lines file whose objects have the fields `keys`.

    Raises:
        UserError: no such file, a line that is no JSON object, a key missing or empty, an id
            given twice; each names the file and the line.
    """
    lines = read_lines(path, "data file")
    wheres = ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
    records = ((where, _record(line, where, keys)) for where, line in wheres)
    problems = problems_of(records, keys, columns or Columns())  # all: a fault is found now
    if not problems:
        raise UserError(f"data file {path}: no problems in it")
    return problems[:limit]


def problems_of(
    records: Iterable[tuple[str, Mapping[str, Any]]], keys: Sequence[str], columns: Columns
) -> list[Problem]:
    """Problems of (where, row) pairs; see `read_problems` for what is refused."""
    problems: dict[str, Problem] = {}
    for where, record in records:
        problem = _problem(record, where, keys, columns)
        if problem.id in problems:
            raise UserError(f"{where}: id {problem.id!r} was given before")
        problems[problem.id] = problem
    return list(problems.values())


def fingerprint(problems: Sequence[Problem]) -> str:
    """A short hash of what is asked and how it is graded: had two runs the same problems?"""
    digest = hashlib.sha256()
    for item in problems:
        parts: list[Any] = [item.id, item.text, item.answer, item.solution]
        if item.tests:
            parts += [item.function, [[test.input, test.output] for test in item.tests]]
        if item.rule:
            parts.append(item.rule)
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()[:16]


def _record(line: str, where: str, keys: Sequence[str]) -> Mapping[str, Any]:
    record = parse_json(line, where)
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected a JSON object with {', '.join(keys)}")
    return record


def _problem(
    record: Mapping[str, Any], where: str, keys: Sequence[str], columns: Columns
) -> Problem:
    texts = {
        field: _text(record, field, getattr(columns, field), where, keys)
        for field in ("id", "problem", "answer", "solution", "starter", "function")
    }
    lists = {}
    for field in ("choices", "tests"):
        found = _lists(record, field, getattr(columns, field))
        if field in keys and not found:
            raise UserError(f"{where}: key {field!r} is missing; expected {', '.join(keys)}")
        lists[field] = found if field in keys else []
    return Problem(
        id=texts["id"],
        text=texts["problem"],
        answer=texts["answer"],
        solution=texts["solution"],
        choices=tuple(_plain(choice, "choices", where) for choice in lists["choices"]),
        tests=tuple(test for value in lists["tests"] for test in code_tests.read(value, where)),
        starter=texts["starter"],
        function=texts["function"],
    )


def _text(
    record: Mapping[str, Any], field: str, column: str, where: str, keys: Sequence[str]
) -> str:
    name = column if _found(record, column) is not None else field
    value = _found(record, name)
    if field not in keys:  # not needed: an odd value is as good as none
        return str(value) if isinstance(value, str | int | float) else ""
    if value is None and name not in record:
        named = "" if column == field else f" (nor {column!r})"
        raise UserError(f"{where}: key {field!r} is missing{named}; expected {', '.join(keys)}")
    return _plain(value, name, where)


def _plain(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str | int | float):
        raise UserError(f"{where}: {name!r} must be text or a number, got {type(value).__name__}")
    text = str(value)
    if not text.strip():
        raise UserError(f"{where}: {name!r} is empty")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{where}: half of a surrogate pair is no text")
    return text


def _lists(record: Mapping[str, Any], field: str, columns: Sequence[str]) -> list[Any]:
    """The values of several columns in one list, lists among them (of choices) spread."""
    found = [value for name in columns if (value := _found(record, name)) is not None]
    if not found and (own := _found(record, field)) is not None:
        found = [own]
    if field == "choices":
        return [item for v in found for item in (v if isinstance(v, list | tuple) else [v])]
    return found


def _found(record: Any, name: str) -> Any:
    """The value of a column, or None; a dotted name looks inside objects and JSON text."""
    if isinstance(record, Mapping) and name in record:
        return record[name]
    outer, _, inner = name.partition(".")
    if not inner or not isinstance(record, Mapping) or outer not in record:
        return None
    value = record[outer]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return _found(value, inner)
