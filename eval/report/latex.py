"""table.tex: the study's table for a paper; it needs the package booktabs and UTF-8 input."""

from collections.abc import Sequence
from pathlib import Path

from kvpolicies.eval.display.escape import visible
from kvpolicies.eval.report import table
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary
from kvpolicies.files import write_text

NAME = "table.tex"
_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "_": r"\_", "&": r"\&",
    "#": r"\#", "$": r"\$", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "−": "$-$", "–": "--", "†": r"$^\dagger$", "‹": r"\textless{}", "›": r"\textgreater{}",
    "\n": " ", "\t": " ",
}  # fmt: skip
_LATIN = 0x17F
"""The last letter that every LaTeX knows from UTF-8 input."""


def write(path: Path, study: Study, cells: Sequence[Summary]) -> None:
    """Writes the table: a line a cell, intervals in brackets."""
    headings, lines = table.table(study, cells)
    columns = "ll" + "r" * (len(headings) - 2)
    text = [
        r"% \usepackage{booktabs} in the preamble; 95 % intervals in brackets.",
        *(f"% {' '.join(visible(note).split())}" for note in table.notes(study, cells)),
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _line(headings),
        r"\midrule",
    ]
    before = ""
    for line, cell in zip(lines, cells, strict=True):
        if before and cell.policy != before:
            text.append(r"\addlinespace")
        text.append(_line(line))
        before = cell.policy
    text += [r"\bottomrule", r"\end{tabular}", ""]
    write_text(path, "\n".join(text))


def escape(text: str) -> str:
    """`text` as pdflatex prints it, on one line; letters that it may not know as their number."""
    escaped = "".join(_sign(sign) for sign in visible(text))
    # A line that begins so would be an option of the line break before it.
    return "{}" + escaped if escaped.startswith(("[", "*")) else escaped


def _sign(sign: str) -> str:
    if sign in _SIGNS:
        return _SIGNS[sign]
    return sign if ord(sign) <= _LATIN else f"[U+{ord(sign):04X}]"


def _line(entries: Sequence[str]) -> str:
    return " & ".join(escape(entry) for entry in entries) + r" \\"
