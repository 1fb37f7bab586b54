"""Every file that is read or written goes through here, so that no caller has to think of failures.

Reading ends with the contents, or with a `UserError` that names the file: it is not there, is a
folder, is not UTF-8. Writing goes to a file beside the target, which takes the target's place when
it is whole: a full disk or a kill leaves what was there before.

Files of lines that grow while a study runs are the exception: eval/study/results.py appends to
them, and `naming` gives their failures a name.
"""

import csv
import io
import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvpolicies.errors import UserError, cut, reason

_MOST_PIPED = 1 << 26
"""Bytes that are read from what is no file: a pipe ends, a device such as /dev/zero does not."""
_THEIRS = ("SafetensorError",)
"""Exceptions that libraries raise for the disk's failures."""


def read_text(path: str | Path, what: str = "") -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Args:
        what: what the file is for, such as "data file": the first words of an error.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    content = read_bytes(path, what)
    with naming(path, what):
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(path: str | Path, what: str = "") -> bytes:
    """The contents of a file.

    Raises:
        UserError: it cannot be read.
    """
    with naming(path, what), open(path, "rb") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file.read()
        content = file.read(_MOST_PIPED + 1)
    if len(content) > _MOST_PIPED:
        raise UserError(f"{what} {cut(str(path))}: no file, and without an end".lstrip())
    return content


def check_readable(path: str | Path, what: str = "") -> None:
    """Looks whether a file is there and can be read, without reading it.

    Raises:
        UserError: it is not, or cannot.
    """
    with naming(path, what), open(path, "rb"):
        pass


def read_lines(path: str | Path, what: str = "") -> list[str]:
    """The lines of a UTF-8 file, empty ones included.

    Raises:
        UserError: as `read_text`.
    """
    return parse_lines(read_text(path, what))


def parse_lines(text: str) -> list[str]:
    """The lines of a text; U+2028 inside of a JSON string or a prompt does not end one."""
    return text.removesuffix("\n").split("\n") if text else []


def read_json(path: str | Path, what: str = "") -> Any:
    """The value in a JSON file.

    Raises:
        UserError: as `read_text` and `parse_json`.
    """
    return parse_json(read_text(path, what), f"{what} {path}".strip())


def parts_of(record: Any, kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`record`, if it is a mapping whose parts are there and of these kinds.

    Args:
        kinds: a type a part; float takes whole numbers too, and nothing infinite or NaN.

    Raises:
        UserError: it is none; names `where` and the part.
    """
    for name, kind in kinds.items():
        value = record.get(name) if isinstance(record, Mapping) else None
        fits = is_number(value) if kind is float else isinstance(value, kind)
        if not fits or (kind is int and isinstance(value, bool)):
            raise UserError(f"{where} (its {name!r})")
    return dict(record)


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a finite number that a float can be."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < sys.float_info.max


def whole_number(text: str) -> int:
    """A whole number as a file says it.

    Raises:
        ValueError: for one that no float holds: no count, size or seed is as large.
    """
    if len(text) > 300:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def parse_json(text: str | bytes, where: str) -> Any:
    """The value that JSON text says.

    Raises:
        UserError: it is no JSON, or nested too deeply; names `where`.
    """
    try:
        value = json.loads(text, parse_int=whole_number)
        if rb"\ud" in text.lower() if isinstance(text, bytes) else r"\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        return value
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(
            f"{cut(where)}: malformed JSON ({error.msg}, {place}column {error.colno})"
        ) from None
    except (ValueError, RecursionError) as error:  # endless numbers, endless brackets
        raise UserError(f"{cut(where)}: malformed JSON ({reason(error)})") from None


def write_text(path: str | Path, text: str) -> None:
    """Writes a UTF-8 file, whole or not at all; what is no text (half of a surrogate) becomes `?`.

    Raises:
        UserError: it cannot be written; what was there before stays.
    """
    with writing(path) as half:
        half.write_text(text, encoding="utf-8", errors="replace", newline="")


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes a file, whole or not at all.

    Raises:
        UserError: as `write_text`.
    """
    with writing(path) as half:
        half.write_bytes(content)


def write_json(path: str | Path, value: Any) -> None:
    """Writes a value as JSON that people can read.

    Raises:
        UserError: as `write_text`.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def without_nan(value: Any) -> Any:
    """A value for JSON: null for what is no number, and named tuples by their names."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {str(key): without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(path: str | Path, lines: Iterable[Sequence[Any]]) -> None:
    """Writes lines as CSV, the headings first.

    Raises:
        UserError: as `write_text`.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_text(path, text.getvalue())


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to; at the end it takes the place of `path`.

    What goes wrong inside removes it again. Links are followed.

    Raises:
        UserError: it cannot be written, or a folder or a device has its name.
    """
    with naming(path, doing="cannot be written: "):
        target = Path(path).resolve()
        if target.exists() and not target.is_file():
            raise UserError(f"{cut(str(path))}: cannot be written: it is no file")
        half = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            yield half
            with half.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(half, target)
        except BaseException:
            with suppress(OSError):
                half.unlink(missing_ok=True)
            raise


@contextmanager
def writing_folder(path: str | Path) -> Iterator[Path]:
    """Gives an empty folder beside `path` to fill; at the end it takes the place of `path`.

    Raises:
        UserError: as `writing`.
    """
    with naming(path, doing="cannot be written: "):
        target = Path(path).resolve()
        half, old = (target.with_name(f"{target.name}.{os.getpid()}.{x}") for x in ("part", "old"))
        half.mkdir(parents=True)
        try:
            yield half
            if target.exists():
                os.replace(target, old)
            os.replace(half, target)
        finally:
            for folder in (half, old):
                shutil.rmtree(folder, ignore_errors=True)


def check_free(path: Path, flag: str, force: bool) -> None:
    """Refuses a place where no file can be written, or one is that must stay; writes nothing.

    Args:
        flag: the option that named it, the first words of an error. force: what is there may go.

    Raises:
        UserError: for either.
    """
    with naming(path, flag, "cannot be written: "):
        there, folder = path.exists(), path.parent.is_dir()
    text = f"{flag} {cut(str(path))}"
    if path.is_dir():
        raise UserError(f"{text}: is a folder; name a file")
    if there and not path.is_file():
        raise UserError(f"{text}: is no file; name another")
    if not folder:
        raise UserError(f"{text}: no such folder: {path.parent}")
    if there and not force:
        raise UserError(f"{text}: exists; --force overwrites it, or name another file")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{text}: {path.parent} is not writable")


def make_folder(path: str | Path, what: str = "") -> Path:
    """Makes a folder, and those above it, unless it is there.

    Raises:
        UserError: it cannot be made, or something else has its name.
    """
    with naming(path, what, "cannot be made: "):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


@contextmanager
def naming(path: str | Path, what: str = "", doing: str = "") -> Iterator[None]:
    """Turns what the system has against a file into a `UserError` that names it.

    Args:
        what: the first words of the error, before the path. doing: what was wanted, after it.

    Raises:
        UserError: for an operating system's or a decoder's error inside, and safetensors' own.
    """
    where = f"{what} {cut(str(path))}: {doing}".lstrip()
    if "\0" in str(path):
        raise UserError(f"{where}no file has a null byte in its name")
    try:
        yield
    except Exception as error:
        ours = isinstance(error, OSError | UnicodeError) or type(error).__name__ in _THEIRS
        if not ours:
            raise
        raise UserError(f"{where}{reason(error)}") from None
