"""One task on one set of problems: the samples of every cell, all of them or none.

A folder is refused unless every cell has every problem, for a mean over whichever problems happened
to be done first is no measurement.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpolicies.errors import UserError, caution
from kvpolicies.eval.select.sources import StudyFolder
from kvpolicies.eval.study import results
from kvpolicies.eval.study.config import Cell, cells
from kvpolicies.eval.study.records import FULL, Grid
from kvpolicies.eval.tasks.measures import Row

GRADE = "correct"
"""The field of a result row that says how right a sample is, 0 to 1."""


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
    cut: np.ndarray
    """[P, S], whether it was cut off at the limit of new tokens."""
    processor: float
    """Seconds of the processor, all samples; nan where a row does not say."""

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


def read_bench(source: StudyFolder) -> Bench:
    """The samples of a folder.

    Raises:
        UserError: a study that is unfinished, or rows that cannot be read.
    """
    folder = Path(source.folder)
    if not results.shards(folder):
        raise UserError(f"{folder}: the study is unfinished: no {results.NAME}; run it again")
    every = results.find_rows(folder, Grid.of(source.study, source.problem_ids))
    rows, said = every.rows, every.said(folder)
    problems = tuple(dict.fromkeys(str(row["problem"]) for row in rows))
    grid = cells(source.study)
    kept: dict[Cell, dict[tuple[str, int], Row]] = {cell: {} for cell in grid}
    for row in rows:
        kept[Cell(row["policy"], row["budget"])][row["problem"], row["sample"]] = row
    _check_finished(source, problems, kept, said)
    if said:
        caution(said)
    study = source.study
    measured = {cell: _measured(kept[cell], problems, study.samples) for cell in grid}
    longest = max(int(cell.lengths.max()) for cell in measured.values())
    limit = study.max_new_tokens or longest
    return Bench(study.task, problems, study.samples, limit, measured)


def _check_finished(
    source: StudyFolder,
    problems: tuple[str, ...],
    kept: dict[Cell, dict[tuple[str, int], Row]],
    dropped: str,
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
            f"finish it with the command that began it{dropped and f' ({dropped})'}"
        )


def _some(items: Sequence[str], most: int, separator: str = ", ") -> str:
    more = len(items) - most
    return separator.join(items[:most]) + (f"{separator}{more} more" if more > 0 else "")


def _measured(
    rows: dict[tuple[str, int], Row], problems: tuple[str, ...], samples: int
) -> Measured:
    order = [rows[problem, sample] for problem in problems for sample in range(samples)]

    def column(key: str, missing: float = 0) -> np.ndarray:
        return np.array([row.get(key, missing) for row in order]).reshape(len(problems), samples)

    return Measured(
        correct=column(GRADE).astype(float),
        lengths=column("length"),
        slots=column("slots"),
        prompts=column("prompt_tokens"),
        cut=column("finish") == "length",
        processor=float(column("processor", math.nan).sum()),
    )


def label(cell: Cell) -> str:
    """`beacon(...) @ 133`; full has no budget."""
    return FULL if cell.policy == FULL else f"{cell.policy} @ {cell.budget}"
