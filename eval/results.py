"""results.jsonl: one row a sample, append-only, flushed row by row; what a killed run resumes from.

Every process that works on a study appends to a file of its own: the first to results.jsonl, the
next to results.0001.jsonl, and so on. The rows of all of them are the study's (`read_folder`); when
none is missing they are merged into results.jsonl.

A process that was killed may leave half a line at the end. It is cut off when the file is opened
for appending again; a broken line anywhere else is an error, since no run of ours writes one.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from kvpolicies.errors import UserError
from kvpolicies.eval import claims
from kvpolicies.eval.claims import Claims
from kvpolicies.files import naming, read_bytes, writing

NAME = "results.jsonl"
FULL = "full"
"""The reference's policy in every row, and its budget: it has none."""

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
    for number, line in enumerate(whole_lines(read_bytes(path)), 1):
        row = _row(line, f"{path}:{number}")
        if Key.of(row) in seen:
            raise UserError(f"{path}:{number}: not a result row; move the file away")
        seen.add(Key.of(row))
        rows.append(row)
    return rows


def shards(folder: Path) -> list[Path]:
    """The files of rows that the folder holds, results.jsonl first."""
    first = [folder / NAME] if (folder / NAME).exists() else []
    return first + sorted(folder.glob("results.[0-9][0-9][0-9][0-9].jsonl"))


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """The rows of all files of a folder, in the order of their keys.

    Of rows with one key, which only a shared disk that lost touch with its locks lets happen, the
    first file's counts: a row is a function of the study, timings apart.

    Raises:
        UserError: as `read_rows`.
    """
    rows: dict[Key, dict[str, Any]] = {}
    for path in shards(folder):
        for row in read_rows(path):
            rows.setdefault(Key.of(row), row)
    return [rows[key] for key in sorted(rows)]


class Results:
    """All rows of a folder, and the one file that this process appends to, once it has a row.

    Use it in a `with` block: it holds the process's `claims` on the folder.

    Args:
        writes: False keeps new rows in memory: another process writes the same ones.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.claims = Claims(folder)
        self.rows: list[dict[str, Any]] = []
        self.keys: set[Key] = set()
        self._file: BinaryIO | None = None
        # Of each file: which one it was, and bytes and lines read of it.
        self._read: dict[Path, tuple[int, int, int]] = {}

    def __enter__(self) -> "Results":
        self.claims.__enter__()
        try:
            self.refresh()
        except BaseException:
            self.claims.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file:
            with suppress(OSError):  # on a full disk, which a row was refused for before
                self._file.close()
        self.claims.__exit__(kind, error, trace)

    def __contains__(self, key: Key) -> bool:
        return key in self.keys

    def refresh(self) -> int:
        """Takes in the rows that other processes wrote since the last look; how many are new."""
        there = len(self.rows)
        for path in shards(self.folder):
            try:
                with path.open("rb") as file:
                    identity = os.fstat(file.fileno()).st_ino
                    known, start, before = self._read.get(path, (identity, 0, 0))
                    start, before = (start, before) if known == identity else (0, 0)
                    file.seek(start)
                    lines = whole_lines(file.read())
            except FileNotFoundError:  # merged meanwhile, by another process
                continue
            for number, line in enumerate(lines, before + 1):
                self._keep(_row(line, f"{path}:{number}"))
            read = start + sum(len(line) + 1 for line in lines)
            self._read[path] = (identity, read, before + len(lines))
        return len(self.rows) - there

    def add(self, row: dict[str, Any]) -> bool:
        """Appends a row unless its key is there already; True if it was new."""
        if Key.of(row) in self.keys:
            return False
        if self.writes:
            with naming(self.folder / NAME, doing="cannot be written: "):
                self._file = self._file or self._own_file()
                self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                self._file.flush()
        return self._keep(row)

    def merge(self) -> None:
        """Puts all rows into results.jsonl, in one step, and removes the other files.

        Only for a study that is complete: no process has a row to append any more.
        """
        self.claims.wait(claims.FOLDER)
        try:
            others = [path for path in shards(self.folder) if path.name != NAME]
            if not others:
                return
            with writing(self.folder / NAME) as half, half.open("wb") as file:
                for row in read_folder(self.folder):
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            for path in others:
                path.unlink()
        finally:
            self.claims.release(claims.FOLDER)

    def _keep(self, row: dict[str, Any]) -> bool:
        key = Key.of(row)
        if key in self.keys:
            return False
        self.rows.append(row)
        self.keys.add(key)
        return True

    def _own_file(self) -> BinaryIO:
        """The first file that no living process appends to, without the half line of a dead one."""
        number = 0
        while not self.claims.take(claims.writer(number)):
            number += 1
        path = self.folder / (f"results.{number:04}.jsonl" if number else NAME)
        return open_whole(path)


def whole_lines(content: bytes) -> list[bytes]:
    """The lines that end in a newline, without it."""
    return content.split(b"\n")[:-1]


def open_whole(path: Path) -> BinaryIO:
    """Opens a file of lines for appending, behind its last whole line."""
    file = path.open("ab")
    os.truncate(path, sum(len(line) + 1 for line in whole_lines(path.read_bytes())))
    return file


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        *names, sample = Key.of(row)
        if not (all(isinstance(name, str) for name in names) and isinstance(sample, int)):
            raise ValueError
        if not row.keys() >= WRITTEN:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where}: not a result row; move the file away") from None
    return row
