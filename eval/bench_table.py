"""A bench's rows as CSV and on the terminal."""

import csv
from pathlib import Path
from typing import Any


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """One line a row; the first row names the columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Bytes in MB, shares in per cent."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal or console.width < 200:
        console = Console(width=200)  # lines that wrap are read more easily than folded words
    table = Table(box=None)
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*[_shown(key, value) for key, value in row.items()])
    console.print(table)


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.startswith("share_"):
        return f"{100 * value:.1f} %"
    if key.endswith("_bytes") or key in ("weights", "cache", "state", "logits", "total"):
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,}" if isinstance(value, int) else str(value)
