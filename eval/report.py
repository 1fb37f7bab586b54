"""report.html: one self-contained page made from results.jsonl and run.json alone.

Nothing is loaded from anywhere: style and plots are inside the file. The same numbers feed
summary.csv, pairs.csv, the page, and the table on the terminal (`table`).
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicies.eval import analysis, controls, lookahead, plots, provenance, words
from kvpolicies.eval.results import read_folder
from kvpolicies.eval.study import Study
from kvpolicies.eval.summary import Summary
from kvpolicies.eval.units import size

NAME = "report.html"
_TEMPLATE = Path(__file__).parent / "report.html.j2"


def write_report(folder: Path, study: Study) -> list[Summary]:
    """Writes the analysis' files, the plots and report.html from the folder's rows.

    Returns the cells.
    """
    rows = read_folder(folder)
    found = analysis.analyse(study, rows)
    summaries = found.cells
    analysis.write(folder, study, found)
    pictures = plots.write_plots(folder, study, summaries)
    headings, lines = table(study, summaries)
    page = _render(
        title=f"{study.task}: {study.model}",
        task=study.entry.summary,
        sentences=[*words.sentences(study, summaries, rows), *words.compared(study, found)],
        headings=headings,
        lines=lines,
        plots=[
            {
                "heading": measure.heading,
                "light": data_uri(pictures[f"{measure.key}-light"]),
                "dark": data_uri(pictures[f"{measure.key}-dark"]),
            }
            for measure in study.entry.measures
        ],
        notes=notes(study, summaries),
        run=json.loads((folder / provenance.NAME).read_text()),
    )
    (folder / NAME).write_text(page, encoding="utf-8")
    return summaries


def table(study: Study, summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """(headings, lines) of the table that the page and the terminal show."""
    measures = study.entry.measures
    headings = ["policy", "budget"]
    for item in measures:
        headings.append(item.heading + (" %" if item.percent else ""))
        if item.against_full:
            headings.append("− full")
    shown = controls.shown(summaries)
    headings += [f"− {controls.NAMES[name]}" for name in shown]
    headings += ["most slots", "cache", "policy state", "tokens/s"]
    lines = []
    for cell in summaries:
        line = [cell.label, "–" if cell.is_full else cell.budget]
        for item in measures:
            line.append(item.show(cell.values[item.key]))
            if item.against_full:
                gap = item.show(cell.differences[item.key], signed=True)
                line.append("" if cell.is_full else gap)
        line += controls.entries(measures[0], cell, shown)
        line += [_slots(cell), size(cell.cache_bytes), size(cell.state_bytes)]
        speed = "" if cell.lookahead else f"{cell.tokens_per_second:.0f}"
        lines.append([*line, speed])
    return headings, lines


def _slots(cell: Summary) -> str:
    if cell.over_budget:
        return f"{cell.max_slots} (over budget)"
    return str(cell.max_slots)


def notes(study: Study, summaries: Sequence[Summary]) -> list[str]:
    """What the table's columns and marks mean."""
    said = [
        "− full: this cell minus full on the same problems, in "
        + ("nats" if study.entry.forced else "percentage points")
        + ". An interval without width means that no problem differed.",
        "most slots: the largest number that any head of any layer held in any sample. "
        "cache: keys, values and positions of one sequence, all layers, as allocated. "
        "policy state: what the policy keeps besides, of one sequence, all layers.",
        "tokens/s: new tokens over the wall-clock time of their forwards, "
        f"up to {study.batch_size} sequences at once, on the machine below; it includes "
        "prefill and scoring, and it varies with what else the machine does.",
    ]
    said[1:1] = [
        f"{controls.NAMES[name]}: {controls.MEANINGS[name]}." for name in controls.shown(summaries)
    ]
    if study.entry.forced:
        said.insert(0, "Budgets are shares of each problem's prompt and solution together.")
    if any(cell.lookahead for cell in summaries):
        said.insert(0, lookahead.note(study.entry.forced))
    return said


def data_uri(path: Path) -> str:
    """A PNG as text that stands inside a page."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _render(**context: Any) -> str:
    from jinja2 import Environment, StrictUndefined

    text = _TEMPLATE.read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text).render(**context)
