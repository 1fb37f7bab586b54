"""Runs a study: every policy at every budget on the same problems, resumable at any moment.

Problems are cut into fixed units; within a unit `full` goes first and then every cell (policy at
budget), so that a run that stops early has compared all of them on the same problems. A unit whose
rows are not all there is computed again as it was the first time, and only missing rows are
appended: results are a function of the study, timings apart. Any number of processes can share one
folder (sharing.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicies.adapter import inspect_model
from kvpolicies.decoding import Generation, generate
from kvpolicies.errors import caution
from kvpolicies.eval.study import controls, launch, lookahead, prompts, provenance, texts
from kvpolicies.eval.study import work_queue as sharing
from kvpolicies.eval.study.config import Cell, Study, cells
from kvpolicies.eval.study.launch import Group, ProcessRank
from kvpolicies.eval.study.preparing import Prepared, SharedModel, prepare
from kvpolicies.eval.study.progress import Bars
from kvpolicies.eval.study.prompts import StudyRequest
from kvpolicies.eval.study.records import Grid
from kvpolicies.eval.study.results import Key, Results
from kvpolicies.eval.study.summary import FULL
from kvpolicies.eval.tasks.fidelity import PredictionScorer, split_units
from kvpolicies.eval.tasks.task import Grades
from kvpolicies.models import loading
from kvpolicies.registry import resolve

UNIT_BATCHES = 2
"""Batches in a unit of generation: more loses more to a kill, less wastes finished rows."""


@dataclass(frozen=True)
class Session:
    """What the units of a run share."""

    study: Study
    group: Group
    model: Any
    tokenizer: Any
    stops: list[int]
    results: Results
    bars: Bars
    cuts: controls.Cuts

    @property
    def parts(self) -> int:
        """Processes that hold a part of every cache, as large as this one's."""
        return inspect_model(self.model).parts


def run_study(study: Study) -> Path:
    """Runs what is missing of `study` and returns its folder, which then holds every row.

    Raises:
        UserError: as `prepare`; a folder that holds another study.
    """
    with SharedModel() as kept:
        return Path(run_prepared(prepare(study, kept), kept).study.out)


def run_prepared(ready: Prepared, kept: SharedModel) -> Prepared:
    """`run_study` of what is prepared; returns what the folder holds at the end.

    Where another process makes it grow meanwhile, that is a larger study.
    """
    while True:
        study, group, model = ready.study, ready.group, ready.model
        described = provenance.describe_model(model)  # by all: each holds a part of the weights
        opened = group.leads and provenance.open_folder(
            study, ready.problems, described, ready.asked
        )
        if group.agree(opened):
            units = _units(study, ready.requests, model)
            _run_units(study, group, launch.here(), (model, ready.tokenizer), units)
            if group.agree(provenance.joined(study) == study):
                return ready
        ready = prepare(study, kept)


def _run_units(
    study: Study,
    group: Group,
    place: ProcessRank,
    made: tuple[Any, Any],
    units: list[list[StudyRequest]],
) -> None:
    grid = cells(study)
    keys = [[Key(*c, r.problem.id, r.sample) for c in grid for r in unit] for unit in units]
    rows = Grid.of(study, {request.problem.id for unit in units for request in unit})
    with Results(Path(study.out), rows, writes=group.leads) as results:
        if place.leads and (said := results.found.said(results.folder)):
            caution(said)  # before a bar is shown
        with Bars(len(units), len(grid), sum(map(len, keys)), shown=place.leads) as bars:
            bars.rows(len(results.rows))
            cuts = controls.Cuts(study.entry, results, lambda t: prompts.decode(t, made[1]))
            session = Session(study, group, *made, loading.stop_tokens(*made), results, bars, cuts)
            for index in group.follow(sharing.turns(results, keys, bars)):
                if not group.leads:
                    results.refresh()
                _run_unit(session, grid, units[index])
            if group.leads:
                results.merge()


def _units(study: Study, requests: Sequence[StudyRequest], model: Any) -> list[list[StudyRequest]]:
    assert study.batch_size is not None, "a resolved study"
    if study.entry.forced:
        vocabulary = model.get_output_embeddings().weight.shape[0]
        lengths = [len(request.forced or ()) for request in requests]
        blocks = split_units(lengths, study.batch_size, vocabulary)
    else:
        blocks = split_units([0] * len(requests), UNIT_BATCHES * study.batch_size, None)
    return [[requests[index] for index in block] for block in blocks]


def _run_unit(session: Session, grid: list[Cell], unit: list[StudyRequest]) -> None:
    wanted = session.group.agree([cell for cell in grid if _missing(session, cell, unit)])
    full_scorer: PredictionScorer | None = None
    for cell in grid:
        session.bars.cell(*cell)
        if not session.study.entry.forced:
            if cell in wanted:
                _generate_cell(session, cell, unit)
        elif wanted and cell.policy == FULL:  # the reference is needed, its rows there or not
            full_scorer = _score_cell(session, cell, unit, None)
        elif cell in wanted:
            _score_cell(session, cell, unit, full_scorer)
        session.bars.cell_done()


def _missing(session: Session, cell: Cell, unit: list[StudyRequest]) -> bool:
    return any(Key(*cell, r.problem.id, r.sample) not in session.results for r in unit)


def _generate_cell(session: Session, cell: Cell, unit: list[StudyRequest]) -> None:
    forced: list[list[int]] | None = None
    if lookahead.mode(cell.policy, forced=False):
        full = [Key(FULL, FULL, request.problem.id, request.sample) for request in unit]
        forced = lookahead.tokens_of(session.results.rows, full)

    study = session.study

    def finished(index: int, generation: Generation) -> None:
        shown = generation  # on the text that it was given, where it looks ahead
        if forced is not None:
            generation = lookahead.as_chosen(generation, session.stops)
        text = prompts.decode(generation.tokens, session.tokenizer)
        grades = study.entry.grade(unit[index].problem, text)
        more = texts.field(study, unit[index], shown, session.tokenizer)
        if cell.policy != FULL and forced is None:
            more["controls"] = session.cuts.of(
                unit[index], generation, study.budget_spec(cell.budget)
            )
        _add(session, cell, unit[index], generation, grades, generation.tokens, text, **more)

    _decode(
        session,
        cell,
        unit,
        temperature=study.temperature,
        top_p=study.top_p,
        top_k=study.top_k,
        eos_token_id=session.stops,
        forced=forced,
        on_finish=finished,
    )


def _score_cell(
    session: Session, cell: Cell, unit: list[StudyRequest], reference: PredictionScorer | None
) -> PredictionScorer:
    forced = [request.forced or [] for request in unit]
    scorer = PredictionScorer(forced, reference)

    def finished(index: int, generation: Generation) -> None:
        held = texts.field(session.study, unit[index], generation, session.tokenizer)
        _add(session, cell, unit[index], generation, scorer.grades(index), [], "", **held)

    _decode(session, cell, unit, forced=forced, on_logits=scorer.on_logits, on_finish=finished)
    return scorer


def _decode(session: Session, cell: Cell, unit: list[StudyRequest], **options: Any) -> None:
    # A process of several that share a model sees the evictions of its own heads only.
    # A process of several that share a model sees the evictions of its own heads only; keys that
    # are re-rotated have no trace.
    alone = session.group.size == 1 and not resolve(cell.policy).rerotates
    trace = alone and any(texts.wanted(session.study, r) for r in unit)
    generate(
        session.model,
        [request.prompt for request in unit],
        cell.policy,
        "100%" if cell.policy == FULL else session.study.budget_spec(cell.budget),
        max_new_tokens=[request.max_new_tokens for request in unit],
        batch_size=session.study.batch_size,
        seed=session.study.seed,
        charge_state=session.study.charge_state,
        request_ids=[request.identity for request in unit],
        trace=trace,
        **options,
    )


def _add(
    session: Session,
    cell: Cell,
    request: StudyRequest,
    made: Generation,
    grades: Grades,
    tokens: list[int],
    text: str,
    **more: Any,
) -> None:
    row = {
        "policy": cell.policy,
        "budget": cell.budget,
        "problem": request.problem.id,
        "sample": request.sample,
        **grades,
        "finish": made.finish,
        "prompt_tokens": made.prompt_tokens,
        "length": len(made.tokens),
        "slots": made.budget_total,
        "asked": made.asked_slots,
        "max_slots": made.max_slots,
        "cache_bytes": made.cache_bytes * session.parts,
        "state_bytes": made.state_bytes * session.parts,
        "seconds": round(made.seconds, 6),
        "processor": round(made.processor, 6),
        "tokens": tokens,
        "text": text,
        **more,
    }
    if session.model.device.type != "cpu":  # whose work no processor's clock shows
        del row["processor"]
    if told := lookahead.mode(cell.policy, session.study.entry.forced):
        row["mode"] = told
    if session.results.add(row):
        session.bars.rows(1)
