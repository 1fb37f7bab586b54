"""Tables on standard output."""

import re
from collections.abc import Collection, Sequence

WIDE = 160
"""Columns where no terminal says its own: a file, a pipe."""
LONG = 24
"""Characters of a word that may be broken: a path, a policy with many options."""


def print_table(
    title: str,
    headings: Sequence[str],
    lines: Sequence[Sequence[str]],
    left: Collection[str] = (),
    sections: bool = False,
) -> None:
    """Prints a table as it stands, without markup; entries fold between words where it is narrow.

    A terminal too narrow for the words side by side wraps whole lines instead.

    Args:
        left: headings of columns that align left, as the first one always does.
        sections: a line of its own between lines whose first entries differ.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    columns = list(zip(headings, *lines, strict=True))
    widths = _widths(columns, console.width if console.is_terminal else WIDE)
    console = Console(width=max(WIDE, sum(widths) + 2 * len(widths)))
    shown = Table(title=Text(title, style="table.title") if title else None, box=None)
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        side = "left" if index == 0 or heading in left else "right"
        shown.add_column(Text(heading), justify=side, overflow="fold", width=width)
    before = ""
    for line in lines:
        if sections and before and line[0] != before:
            shown.add_section()
        shown.add_row(*map(Text, line))
        before = line[0]
    console.print(shown)


def _widths(columns: Sequence[Sequence[str]], total: int) -> list[int]:
    """Characters of each column: as `total` has room for, and never less than its longest word."""
    from rich.cells import cell_len

    widths = [max(map(_unbroken, column)) for column in columns]
    wanted = [max(map(cell_len, column)) for column in columns]
    left = total - sum(widths) - 2 * len(widths)
    while left > 0 and any(map(int.__lt__, widths, wanted)):
        for index, most in enumerate(wanted):
            if widths[index] < most and left > 0:
                widths[index] += 1
                left -= 1
    return widths


def _unbroken(text: str) -> int:
    """Characters of its longest part that stays on a line; a number stays beside its unit."""
    parts = re.findall(r"[\d.,]+ \S{1,3}$|\S+", text)
    return max((min(len(part), LONG) for part in parts), default=0)
