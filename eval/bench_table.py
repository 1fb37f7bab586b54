"""A bench's rows as CSV and on the terminal."""

import csv
from pathlib import Path
from typing import Any

from kvpolicies.eval import terminal


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """One line a row; the first row names the columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


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
