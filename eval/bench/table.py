"""A bench's rows: read again, as CSV, and on the terminal."""

import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from kvpolicies import files
from kvpolicies.errors import UserError
from kvpolicies.eval.display import terminal
from kvpolicies.eval.study.results import whole_lines

Row = TypeVar("Row")


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Rows of an earlier run; none if there is no file. Half a line at the end is left out.

    Raises:
        UserError: a line that is no such row, by its number.
    """
    rows, hints = [], typing.get_type_hints(kind)
    lines = whole_lines(files.read_bytes(path)) if path.exists() else []
    for number, line in enumerate(lines, 1):
        record = files.parse_json(line, f"{path}:{number}")
        if (
            not isinstance(record, dict)
            or record.keys() != hints.keys()
            or not all(_is(value, hints[name]) for name, value in record.items())
        ):
            raise UserError(f"{path}:{number}: no row of this bench; choose another --out")
        rows.append(kind(**record))
    return rows


def _is(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of a field's type."""
    if isinstance(hint, types.UnionType):
        return any(_is(value, part) for part in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is dict and isinstance(value, dict):
        return all(_is(entry, typing.get_args(hint)[1]) for entry in value.values())
    return isinstance(value, (int, float) if kind is float else kind)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """One line a row; the first row names the columns."""
    files.write_csv(path, [list(rows[0]), *(list(row.values()) for row in rows)])


def print_table(rows: list[dict[str, Any]]) -> None:
    """Bytes in MB, shares in per cent; headings are the CSV's, in words."""
    lines = [[_shown(key, value) for key, value in row.items()] for row in rows]
    terminal.print_table("", [key.replace("_", " ") for key in rows[0]], lines)


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.startswith("share_"):
        return f"{100 * value:.1f} %"
    if key.endswith("_bytes") or key in ("weights", "cache", "state", "logits", "total"):
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,}" if isinstance(value, int) else str(value)
