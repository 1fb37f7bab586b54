"""From a folder of rows to its files: plots, tables, and the page that holds all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvpolicies.eval import (
    analysis,
    asked,
    foreword,
    lookahead,
    pareto,
    plots,
    provenance,
    words,
)
from kvpolicies.eval.analysis import Analysis
from kvpolicies.eval.measures import Row
from kvpolicies.eval.records import Grid
from kvpolicies.eval.report import comparisons, grid, latex, lengths, order, origin, samples, table
from kvpolicies.eval.report.visible import visible
from kvpolicies.eval.results import find_rows
from kvpolicies.eval.study import Study
from kvpolicies.eval.summary import Summary
from kvpolicies.eval.units import size
from kvpolicies.files import write_text

NAME = "report.html"
_HERE = Path(__file__).parent


def write_report(folder: Path, study: Study) -> list[Summary]:
    """Writes the analysis' files, table.tex, the plots and report.html from the folder's rows.

    Returns the cells.
    """
    record = provenance.read_record(folder)
    every = find_rows(folder, Grid.of(study, provenance.problem_ids(record)))
    rows, dropped = every.rows, every.said(Path(folder.name))
    found = analysis.analyse(study, rows)
    analysis.write(folder, study, found)
    latex.write(folder / latex.NAME, study, found.cells)
    draws = plots.against_budget(study, found.cells) | pareto.plot(study, found.cells)
    pictures = plots.write_plots(folder, draws)
    page = _render(
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
    return found.cells


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


def _render(**context: Any) -> str:
    return _environment().get_template("page.html.j2").render(**context)


def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )


def _finalized(value: Any) -> Any:
    return visible(value) if type(value) is str else value
