"""What finished studies say about every policy at every budget, task by task.

Folders of the same task on the same problems are one bench: the policies of both meet there. A
folder is refused unless every cell has every problem, for a mean over whichever problems happened
to be done first is no measurement.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicies.config import from_mapping
from kvpolicies.errors import UserError
from kvpolicies.eval import lookahead, provenance, results
from kvpolicies.eval.measures import Row
from kvpolicies.eval.run import Cell, cells
from kvpolicies.eval.study import Study
from kvpolicies.eval.summary import FULL

GRADE = "correct"
"""The field of a result row that says how right a sample is, 0 to 1."""
_SHARED = ("model", "dtype", "temperature", "top_p")
"""What a deployment has one of, so that all folders must agree."""
_OWN = ("out", "policies", "budgets", "batch_size", "device", "data")
"""What studies of one bench may differ in."""


@dataclass(frozen=True)
class Source:
    """A study folder: what it ran, on which code and which problems."""

    folder: str
    study: Study
    commits: tuple[str, ...]
    fingerprint: str
    """Of the problems."""
    problems: int
    weights: str
    """A short hash of the model's."""


@dataclass(frozen=True)
class Measured:
    """One cell's samples on one bench. P problems, S samples of each."""

    correct: np.ndarray
    """[P, S], 0 to 1."""
    lengths: np.ndarray
    """[P, S], new tokens."""
    slots: np.ndarray
    """[P, S], the budget in force."""
    prompts: np.ndarray
    """[P, S], tokens of the prompt; 0 where rows do not say."""
    seconds: float

    @property
    def by_problem(self) -> np.ndarray:
        """[P], the share of right samples of each problem."""
        return self.correct.mean(axis=1)


@dataclass(frozen=True)
class Bench:
    """One task on one set of problems, and what every cell did there."""

    label: str
    problems: tuple[str, ...]
    samples: int
    limit: int
    """Most new tokens that a sample was allowed, or made, where each problem has its own limit."""
    cells: dict[Cell, Measured]

    @property
    def full(self) -> Measured:
        """The reference, on the same problems."""
        return self.cells[Cell(FULL, FULL)]


@dataclass(frozen=True)
class Evidence:
    """All benches, and which cells were measured on each of them."""

    sources: tuple[Source, ...]
    benches: tuple[Bench, ...]
    cells: tuple[Cell, ...]
    """The candidates: full first."""
    left_out: dict[Cell, str]
    """Cells that are none, and why."""

    @property
    def study(self) -> Study:
        """The first study: model, sampling and dtype are the same in all."""
        return self.sources[0].study

    @property
    def prompt_tokens(self) -> int:
        """Of the longest prompt measured; 0 where no row says."""
        return max(int(bench.full.prompts.max()) for bench in self.benches)


def read(folders: Sequence[str], model: str | None) -> Evidence:
    """The evidence in `folders`, of `model` (default: whichever they share).

    Raises:
        UserError: no study there, an unfinished one, one that grades no answers or charges state
            to the budget, another model, or folders that no deployment can be chosen from together.
    """
    sources = [_source(Path(folder)) for folder in dict.fromkeys(folders)]
    _check_alike(sources, model)
    benches: dict[str, Bench] = {}
    for source in sources:
        key = f"{source.study.task} {source.fingerprint}"
        mine = _bench(source)
        if key in benches:
            _check_same_bench(source, next(s for s in sources if s.fingerprint in key))
            mine = replace(mine, cells={**mine.cells, **benches[key].cells})
        benches[key] = mine
    return _assembled(sources, _labelled(list(benches.values())))


def _assembled(sources: list[Source], benches: list[Bench]) -> Evidence:
    seen = dict.fromkeys(cell for bench in benches for cell in bench.cells)
    left_out = {}
    for cell in seen:
        absent = [bench.label for bench in benches if cell not in bench.cells]
        if lookahead.mode(cell.policy, forced=False):
            left_out[cell] = "is told what is to come: no policy to deploy"
        elif absent:
            left_out[cell] = f"was not measured on {', '.join(absent)}"
    chosen = tuple(cell for cell in seen if cell not in left_out)
    return Evidence(tuple(sources), tuple(benches), chosen, left_out)


def _labelled(benches: list[Bench]) -> list[Bench]:
    """Labels made unique: the second bench of a task is called `ledger 2`."""
    counts: dict[str, int] = {}
    found = []
    for bench in benches:
        counts[bench.label] = number = counts.get(bench.label, 0) + 1
        found.append(replace(bench, label=bench.label + (f" {number}" if number > 1 else "")))
    return found


def _source(folder: Path) -> Source:
    record = _record(folder)
    where = str(folder / provenance.NAME)
    try:
        study = from_mapping(Study, record["study"], where)
        count, weights = record["problems"], str(record["model"]["weights"])
        commits = dict.fromkeys(str(e.get("commit")) for e in record["environments"])
        fingerprint = str(record["problems_fingerprint"])
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not the record of a study ({error})") from None
    if not isinstance(count, int) or count < 1:
        raise UserError(f"{where}: problems must be a whole number above 0, got {count!r}")
    if study.charge_state:
        raise UserError(
            f"{folder}: its policies paid for their state in slots (charge_state), "
            "which no deployment does; run the study without"
        )
    if study.entry.forced:
        raise UserError(
            f"{folder}: task {study.task} grades no answers, so it has no accuracy "
            "to choose by; give a study of a task that generates"
        )
    return Source(str(folder), study, tuple(commits), fingerprint, count, weights)


def _record(folder: Path) -> dict[str, Any]:
    path = folder / provenance.NAME
    try:
        if not folder.is_dir():
            raise UserError(f"study folder {str(folder)[:200]}: no such folder")
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: holds no {provenance.NAME}; not the --out of a study") from None
    except UserError:
        raise
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{path}: cannot be read") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: not the record of a study")
    if "bench" in record:
        raise UserError(f"{folder}: holds a bench, which measures no accuracy; give a study")
    return record


def _check_alike(sources: list[Source], model: str | None) -> None:
    first = sources[0]
    for source in sources:
        if model is not None and source.study.model != model:
            raise UserError(f"{source.folder}: measured {source.study.model}, not --model {model}")
        for key in _SHARED:
            mine, theirs = getattr(source.study, key), getattr(first.study, key)
            if mine != theirs:
                raise UserError(
                    f"{source.folder} and {first.folder} differ in {key} ({mine} and "
                    f"{theirs}); a deployment has one"
                )
        if source.weights != first.weights:
            raise UserError(
                f"{source.folder} and {first.folder}: other weights of "
                f"{first.study.model}; measure one of them again"
            )


def _check_same_bench(source: Source, other: Source) -> None:
    mine, theirs = source.study.identity(), other.study.identity()
    unlike = [key for key in mine if key not in _OWN and mine[key] != theirs[key]]
    if unlike:
        raise UserError(
            f"{source.folder} and {other.folder}: the same problems under other "
            f"conditions ({', '.join(unlike)}); give one of them"
        )


def _bench(source: Source) -> Bench:
    folder = Path(source.folder)
    if not results.shards(folder):
        raise UserError(f"{folder}: the study is unfinished: no {results.NAME}; run it again")
    try:
        rows = results.read_folder(folder)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror or error}") from None
    problems = tuple(dict.fromkeys(str(row["problem"]) for row in rows))
    grid = cells(source.study)
    kept: dict[Cell, dict[tuple[str, int], Row]] = {cell: {} for cell in grid}
    for row in rows:
        if (cell := Cell(row["policy"], row["budget"])) in kept:
            kept[cell][row["problem"], row["sample"]] = row
    _check_finished(source, problems, kept)
    study = source.study
    measured = {cell: _measured(folder, kept[cell], problems, study.samples) for cell in grid}
    longest = max(int(cell.lengths.max()) for cell in measured.values())
    limit = study.max_new_tokens or longest
    return Bench(study.task, problems, study.samples, limit, measured)


def _check_finished(
    source: Source, problems: tuple[str, ...], kept: dict[Cell, dict[tuple[str, int], Row]]
) -> None:
    lacking = []
    for cell, found in kept.items():
        samples = range(source.study.samples)
        lost = [p for p in problems if any((p, sample) not in found for sample in samples)]
        if lost:
            lacking.append(f"{label(cell)} lacks {_some(lost, 3)}")
    never = source.problems - len(problems)
    if never:
        lacking.append(
            f"{abs(never)} of {source.problems} problems "
            f"{'not reached by any' if never > 0 else 'too many'}"
        )
    if lacking:
        raise UserError(
            f"{source.folder}: the study is unfinished: {_some(lacking, 5, '; ')}; "
            f"finish it with the command that began it"
        )


def _some(items: Sequence[str], most: int, separator: str = ", ") -> str:
    more = len(items) - most
    return separator.join(items[:most]) + (f"{separator}{more} more" if more > 0 else "")


def _measured(
    folder: Path, rows: dict[tuple[str, int], Row], problems: tuple[str, ...], samples: int
) -> Measured:
    order = [rows[problem, sample] for problem in problems for sample in range(samples)]

    def column(key: str, kind: type, missing: Any = None) -> np.ndarray:
        values = [kind(row.get(key, missing)) for row in order]
        return np.array(values).reshape(len(problems), samples)

    try:
        measured = Measured(
            correct=column(GRADE, float),
            lengths=column("length", int),
            slots=column("slots", int),
            prompts=column("prompt_tokens", int, 0),
            seconds=float(column("seconds", float).sum()),
        )
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{folder}: a row without numbers for {GRADE}, length, slots") from None
    if not ((measured.correct >= 0) & (measured.correct <= 1)).all():
        raise UserError(f"{folder}: {GRADE} must lie between 0 and 1")
    return measured


def label(cell: Cell) -> str:
    """`beacon(...) @ 133`; full has no budget."""
    return FULL if cell.policy == FULL else f"{cell.policy} @ {cell.budget}"
