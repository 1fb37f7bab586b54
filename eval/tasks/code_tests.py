"""Tests of answers in code: what goes in, what must come out, and whether it did.

A list of `{"input": ..., "output": ...}`, as objects or as JSON text; also LiveCodeBench's packed
form of that text (base64 of zlib of a pickled string), which is unpacked without running a pickle.
For a program both are text; for a function, `input` is one JSON argument a line and `output` JSON.
"""

import base64
import binascii
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from kvpolicies.errors import UserError

# What programs print; Decimal also takes 1_000, NaN and digits of other scripts.
_NUMBERS = re.compile(r"[-+\d.eE\s]*", re.ASCII)


@dataclass(frozen=True)
class Test:
    """One test."""

    __test__ = False  # pytest: not one of yours

    input: str
    output: str


def read(value: Any, where: str) -> list[Test]:
    """The tests in one column's value.

    Raises:
        UserError: no list of tests; names `where`.
    """
    if isinstance(value, str):
        value = _from_text(value, where)
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where}: tests must be a list of objects with input and output")
    tests = []
    for item in value:
        if not isinstance(item, Mapping) or not {"input", "output"} <= set(item):
            raise UserError(f"{where}: each test must be an object with input and output")
        tests.append(Test(_as_text(item["input"]), _as_text(item["output"])))
    return tests


def same_output(wanted: str, given: str) -> bool:
    """Whether a program's output is right: equal lines, but for spaces at their ends and for how
    numbers are written."""
    ours, theirs = _lines(wanted), _lines(given)
    return len(ours) == len(theirs) and all(
        a == b or _same_numbers(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def same_value(wanted: str, given: str) -> bool:
    """Whether a function's result is right: JSON of equal value; no JSON equals nothing."""
    try:
        return _alike(json.loads(wanted), json.loads(given))
    except (ValueError, RecursionError):
        return False


def _alike(ours: Any, theirs: Any) -> bool:
    """Equal, and of one kind: 1 is 1.0 and not true."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_alike(ours[k], theirs[k]) for k in ours)
    return isinstance(ours, bool) == isinstance(theirs, bool) and ours == theirs


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _from_text(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        return json.loads(_OnlyText(io.BytesIO(packed)).load())
    except (ValueError, RecursionError, TypeError, EOFError, IndexError, zlib.error,
            binascii.Error, pickle.UnpicklingError):  # fmt: skip
        raise UserError(
            f"{where}: tests are neither JSON nor LiveCodeBench's packed form"
        ) from None


class _OnlyText(pickle.Unpickler):
    """Reads plain data: a pickle that names any class or function is refused, not run."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        """Refuses."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(a: str, b: str) -> bool:
    if not (_NUMBERS.fullmatch(a) and _NUMBERS.fullmatch(b)):
        return False
    try:
        return [Decimal(word) for word in a.split()] == [Decimal(word) for word in b.split()]
    except InvalidOperation:
        return False
