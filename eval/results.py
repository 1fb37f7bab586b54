"""results.jsonl: one row a sample, append-only, flushed row by row; what a killed run resumes from.

A run that was killed may leave half a line at the end. It is cut off when the file is opened for
appending; a broken line anywhere else is an error, since no run of ours writes one.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from kvpolicies.errors import UserError

NAME = "results.jsonl"


# What every row holds; a task's own measures come on top.
WRITTEN = {"finish", "length", "slots", "max_slots", "cache_bytes", "state_bytes", "seconds"}


class Key(NamedTuple):
    """What a row is the result of."""

    policy: str
    budget: str
    problem: str
    sample: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Key":
        return cls(row["policy"], row["budget"], row["problem"], row["sample"])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows, in file order; a half-written last line is left out.

    Raises:
        UserError: a line that is no result row, or repeats one (its number is named).
    """
    rows, seen = [], set()
    for number, line in enumerate(whole_lines(path), 1):
        try:
            row = json.loads(line)
            key = Key.of(row)
            if not row.keys() >= WRITTEN or key in seen:
                raise ValueError
            seen.add(key)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{number}: not a result row; move the file away") from None
        rows.append(row)
    return rows


class Results:
    """The file of one run, open for appending. Use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.rows = read_rows(self.path) if self.path.exists() else []
        self.keys = {Key.of(row) for row in self.rows}

    def __enter__(self) -> "Results":
        self._file = open_whole(self.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def __contains__(self, key: Key) -> bool:
        return key in self.keys

    def add(self, row: dict[str, Any]) -> bool:
        """Appends a row unless its key is there already; True if it was new."""
        key = Key.of(row)
        if key in self.keys:
            return False
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.rows.append(row)
        self.keys.add(key)
        return True


def whole_lines(path: Path) -> list[bytes]:
    """The lines that end in a newline, without it."""
    return path.read_bytes().split(b"\n")[:-1]


def open_whole(path: Path) -> BinaryIO:
    """Opens a file of lines for appending, behind its last whole line."""
    if path.exists():
        whole = sum(len(line) + 1 for line in whole_lines(path))
        if whole < path.stat().st_size:
            os.truncate(path, whole)
    return path.open("ab")
