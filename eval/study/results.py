"""results.jsonl: one row a sample, append-only, flushed row by row; what a killed run resumes from.

Every process that works on a study appends to a file of its own: the first to results.jsonl, the
next to results.0001.jsonl, and so on. The rows of all of them are the study's (`find_rows`); when
none is missing they are merged into results.jsonl.

A process that was killed may leave half a line at the end. It is cut off when the file is opened
for appending again. No run of ours writes any other line that is no row of its study
(records.py): such a line counts nowhere, is told of, and stays where it is.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from kvpolicies.errors import UserError
from kvpolicies.eval.study import locks as claims
from kvpolicies.eval.study import records
from kvpolicies.eval.study.locks import Claims
from kvpolicies.eval.study.records import FULL as FULL
from kvpolicies.eval.study.records import Grid, Key
from kvpolicies.files import naming, read_bytes, writing

NAME = "results.jsonl"


class Found(NamedTuple):
    """What files of results hold."""

    rows: list[dict[str, Any]]
    dropped: tuple[str, ...]
    """Lines that count nowhere: where each stands, and why."""

    def said(self, folder: Path) -> str:
        """One line on the lines that count nowhere; empty where there are none."""
        if not self.dropped:
            return ""
        more = f"; and {len(self.dropped) - 3} more" if len(self.dropped) > 3 else ""
        lines = (
            "1 line of results counts"
            if len(self.dropped) == 1
            else (f"{len(self.dropped)} lines of results count")
        )
        return f"{folder}: {lines} nowhere: {'; '.join(self.dropped[:3])}{more}"


class Sieve:
    """Takes in lines of results; keeps the rows that count, each once, and says what is dropped.

    Of rows with one key the first counts: a row is a function of the study, timings apart. Only
    inside of one file that is told of; processes on a disk that lost touch with its locks, or of
    which one knew of more problems, may both write a row.

    Args:
        grid: which rows count; None: all.
    """

    def __init__(self, grid: Grid | None = None) -> None:
        self.grid = grid
        self.rows: list[dict[str, Any]] = []
        self.dropped: dict[str, None] = {}
        self.seen: dict[Key, Any] = {}
        """Which file each kept row was in."""

    def take(self, path: Path, file: Any, lines: Sequence[bytes], before: int = 0) -> None:
        """Takes in lines of a file, the first of them behind `before` others.

        Args:
            file: tells it from another that had or will have its name.
        """
        for number, line in enumerate(lines, before + 1):
            try:
                row = records.read(line, self.grid.measures if self.grid else ())
                if self.grid is not None:
                    self.grid.check(row)
                if not self.keep(row, file) and self.seen[Key.of(row)] == file:
                    raise ValueError("repeats a row")
            except ValueError as error:
                self.dropped[f"{path.name}:{number} ({error})"] = None

    def keep(self, row: dict[str, Any], file: Any = None) -> bool:
        """Keeps a row unless its key is there already; True if it was new."""
        key = Key.of(row)
        if key in self.seen:
            return False
        self.rows.append(row)
        self.seen[key] = file
        return True

    @property
    def found(self) -> Found:
        """All of it, the rows in the order of their keys."""
        return Found(sorted(self.rows, key=Key.of), tuple(self.dropped))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of one file, in file order; a half-written last line is left out.

    Raises:
        UserError: it cannot be read.
    """
    sieve = Sieve()
    sieve.take(path, path, whole_lines(read_bytes(path)))
    return sieve.rows


def shards(folder: Path) -> list[Path]:
    """The files of rows that the folder holds, results.jsonl first."""
    first = [folder / NAME] if (folder / NAME).exists() else []
    return first + sorted(folder.glob("results.[0-9][0-9][0-9][0-9].jsonl"))


def find_rows(folder: Path, grid: Grid | None = None) -> Found:
    """The rows of all files of a folder that are the study's, in the order of their keys.

    Raises:
        UserError: a file that cannot be read.
    """
    sieve = Sieve(grid)
    for path in shards(folder):
        sieve.take(path, path, whole_lines(read_bytes(path)))
    return sieve.found


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """The rows of all files of a folder, whatever study they are of.

    Raises:
        UserError: as `find_rows`.
    """
    return find_rows(folder).rows


class Results:
    """All rows of a folder, and the one file that this process appends to, once it has a row.

    Use it in a `with` block: it holds the process's `claims` on the folder.

    Args:
        grid: which rows are the study's; None: all.
        writes: False keeps new rows in memory: another process writes the same ones.
    """

    def __init__(self, folder: Path, grid: Grid | None = None, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.claims = Claims(folder)
        self._sieve = Sieve(grid)
        self.rows = self._sieve.rows
        self._file: BinaryIO | None = None
        self._number = 0
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
        return key in self._sieve.seen

    @property
    def found(self) -> Found:
        """What the folder held when it was last looked at."""
        return self._sieve.found

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
            self._sieve.take(path, (path, identity), lines, before)
            read = start + sum(len(line) + 1 for line in lines)
            self._read[path] = (identity, read, before + len(lines))
        return len(self.rows) - there

    def add(self, row: dict[str, Any]) -> bool:
        """Appends a row unless its key is there already; True if it was new.

        Raises:
            UserError: a row that no reader would take, such as one with NaN for a measure.
        """
        if (key := Key.of(row)) in self:
            return False
        try:
            records.check(row, self._sieve.grid.measures if self._sieve.grid else ())
        except ValueError as error:
            where = f"{key.policy} at {key.budget}, problem {key.problem!r}"
            raise UserError(f"results of {where}: {error}") from None
        if self.writes:
            with naming(self.folder / NAME, doing="cannot be written: "):
                self._file = self._file or self._own_file()
                self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                self._file.flush()
        return self._sieve.keep(row)

    def merge(self) -> None:
        """Puts all rows into results.jsonl, in one step, and removes the other files.

        Only when this process's study is complete. It does nothing where another process still
        appends, who will do it, or where lines count nowhere, which are not ours to remove.
        """
        if self._file:
            self._file.close()
            self._file = None
            self.claims.release(claims.writer(self._number))
        self.claims.wait(claims.FOLDER)
        held = []
        try:
            paths = shards(self.folder)
            if not [path for path in paths if path.name != NAME] or find_rows(self.folder).dropped:
                return
            for number in (0, *(_number(path) for path in paths if path.name != NAME)):
                if not self.claims.take(claims.writer(number)):
                    return
                held.append(claims.writer(number))
            rows = find_rows(self.folder).rows
            with writing(self.folder / NAME) as half, half.open("wb") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            for path in paths:
                if path.name != NAME:
                    path.unlink()
        finally:
            for claim in (*held, claims.FOLDER):
                self.claims.release(claim)

    def _own_file(self) -> BinaryIO:
        """The first file that no living process appends to, without the half line of a dead one."""
        self._number = 0
        while not self.claims.take(claims.writer(self._number)):
            self._number += 1
        path = self.folder / (f"results.{self._number:04}.jsonl" if self._number else NAME)
        return open_whole(path)


def _number(path: Path) -> int:
    """Which of the files besides results.jsonl."""
    return int(path.name.split(".")[1])


def whole_lines(content: bytes) -> list[bytes]:
    """The lines that end in a newline, without it."""
    return content.split(b"\n")[:-1]


def open_whole(path: Path) -> BinaryIO:
    """Opens a file of lines for appending, behind its last whole line."""
    file = path.open("ab")
    os.truncate(path, sum(len(line) + 1 for line in whole_lines(read_bytes(path))))
    return file
