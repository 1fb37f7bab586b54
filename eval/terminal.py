"""Tables on standard output."""

from collections.abc import Collection, Sequence

WIDE = 160
"""Columns where no terminal says its own: a file, a pipe."""


def print_table(
    title: str,
    headings: Sequence[str],
    lines: Sequence[Sequence[str]],
    left: Collection[str] = (),
    sections: bool = False,
    least: int = 0,
) -> None:
    """Prints a table as it stands, without markup; entries fold where a terminal is narrow.

    Args:
        left: headings of columns that align left, as the first one always does.
        sections: a line of its own between lines whose first entries differ.
        least: columns below which a terminal wraps whole lines instead.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal or console.width < least:
        console = Console(width=max(WIDE, least))
    shown = Table(title=Text(title, style="table.title") if title else None, box=None)
    for index, heading in enumerate(headings):
        side = "left" if index == 0 or heading in left else "right"
        shown.add_column(Text(heading), justify=side, overflow="fold")
    before = ""
    for line in lines:
        if sections and before and line[0] != before:
            shown.add_section()
        shown.add_row(*map(Text, line))
        before = line[0]
    console.print(shown)
