"""From a folder of rows to its files: plots, tables, and the page that holds all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvpolicies.eval.display.bytesize import size
from kvpolicies.eval.display.escape import visible
from kvpolicies.eval.display.pages import render
from kvpolicies.eval.report import (
    analysis,
    comparisons,
    foreword,
    grid,
    latex,
    lengths,
    overview,
    pareto,
    plots,
    samples,
    table,
)
from kvpolicies.eval.report import findings as words
from kvpolicies.eval.report import provenance_view as origin
from kvpolicies.eval.report import sorting as order
from kvpolicies.eval.report.analysis import Analysis
from kvpolicies.eval.study import asked, lookahead, provenance
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.records import Grid
from kvpolicies.eval.study.results import find_rows
from kvpolicies.eval.study.summary import Summary
from kvpolicies.eval.tasks.measures import Row
from kvpolicies.files import write_text

NAME = "report.html"
TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_report(folder: Path, study: Study) -> Analysis:
    """Writes the analysis' files, table.tex, the plots and report.html from the folder's rows.

    Returns what they say, in numbers.
    """
    record = provenance.read_record(folder)
    every = find_rows(folder, Grid.of(study, provenance.problem_ids(record)))
    rows, dropped = every.rows, every.said(Path(folder.name))
    found = analysis.analyse(study, rows)
    analysis.write(folder, study, found)
    latex.write(folder / latex.NAME, study, found.cells)
    draws = plots.against_budget(study, found.cells) | pareto.plot(study, found.cells)
    pictures = plots.write_plots(folder, draws)
    page = render(
        TEMPLATE,
        **_results(study, found, rows, asked.read(record, str(folder / provenance.NAME)), dropped),
        **_pictures(study, found.cells, pictures),
        **_origin(record),
        title=f"{study.task}: {study.model}",
        task=study.entry.summary,
        grid=grid.grid(study, found.cells, rows),
        lengths=lengths.lengths(study, found.cells, rows),
        samples=samples.samples(study, found.cells, rows),
    )
    write_text(folder / NAME, page)
    return found


def _results(
    study: Study,
    found: Analysis,
    rows: Sequence[Row],
    told: dict[str, Any] | None,
    dropped: str,
) -> dict[str, Any]:
    cells = found.cells
    labels = {cell.policy: cell.label for cell in cells}
    return {
        "before": foreword.sentences(study, cells, told) + ([f"{dropped}."] if dropped else []),
        "asked": told,
        "answers": overview.answers(study, found),
        "board": overview.board(study, found),
        "budgets": study.budgets,
        "chart": overview.chart(study, found),
        "warning": overview.warning(study, found, told),
        "sentences": [*words.sentences(study, cells, rows), *words.compared(study, found)],
        "headings": table.headings(study, cells),
        "lines": table.entries(study, cells),
        "notes": table.notes(study, cells),
        "pair_headings": comparisons.HEADINGS,
        "pair_lines": comparisons.listed(study, found.pairs, labels),
        "pair_grids": comparisons.grids(study, found.pairs, labels),
        "unit": "points" if study.entry.measures[0].percent else "",
    }


def _pictures(study: Study, cells: Sequence[Summary], pictures: dict[str, str]) -> dict[str, Any]:
    measure = study.entry.measures[0]
    best = [
        f"{order.title(cell)} ({size(pareto.total_bytes(cell))}, "
        f"{measure.show(cell.values[measure.key])}{' %' if measure.percent else ''})"
        for cell in pareto.front(measure, cells)
    ]
    outside = []
    if any(cell.lookahead for cell in cells):
        outside.append(f"{lookahead.MARK} knows what is to come")
    if any(cell.beyond for cell in cells):
        outside.append("a policy that holds more than the budget by its paper's own rule")
    svg = {name: Markup(visible(text)) for name, text in pictures.items()}
    return {
        "first": measure,
        "pareto": svg.get(pareto.NAME),
        "best": best,
        "outside": outside,
        "mark": lookahead.MARK,
        "plots": [(item.heading, svg[item.key]) for item in study.entry.measures],
    }


def _origin(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": record,
        "commands": origin.commands(record),
        "changed": origin.changed(record),
        "facts": origin.facts(record),
        "environments": origin.environments(record),
        "machines": len(record.get("environments", [])),
    }
