"""Candidates: every policy at every budget with what it would hold where it is to be deployed,
and what the studies say of its accuracy.

Bytes are those of the deployment (its batch, its lengths), predicted from the model's config by
the code that allocates them (`kvpolicies/models/memory.py`); no weights are read. Accuracies are
those of the studies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpolicies.errors import UserError
from kvpolicies.eval.select.benches import Bench, label
from kvpolicies.eval.select.evidence import Evidence
from kvpolicies.eval.stats import intervals as stats
from kvpolicies.eval.stats.bounds import mean_over_tasks
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.eval.study.config import Cell, Study
from kvpolicies.eval.study.summary import FULL
from kvpolicies.models import memory
from kvpolicies.models.memory import Load


@dataclass(frozen=True)
class Figures:
    """On one bench, or as the mean over all: 95 % intervals, each for itself."""

    accuracy: Interval
    loss: Interval
    """Accuracy minus full's, paired by problem."""


@dataclass(frozen=True)
class Candidate:
    """One policy at one budget."""

    cell: Cell
    budget: str
    """As deployed: a ratio of the studies has become slots; 100% for full."""
    memory: memory.Memory
    """Of the whole batch."""
    benches: dict[str, Figures]
    mean: Figures
    """Over benches, each weighing the same."""
    cpu_ms: float
    """Of the processor a new token, in the studies, at their batch size; nan where rows lack it."""

    @property
    def label(self) -> str:
        """Policy and budget as the studies name them."""
        return label(self.cell)

    @property
    def is_full(self) -> bool:
        return self.cell.policy == FULL

    @property
    def held(self) -> int:
        """Bytes that the choice decides: cache and state. Weights are the same for all."""
        return self.memory.cache + self.memory.state


def gather(evidence: Evidence, model: Any, load: Load) -> tuple[list[Candidate], dict[Cell, str]]:
    """All candidates, full first; and the cells that cannot be deployed so, with the reason.

    Args:
        model: on the meta device will do (`memory.meta_model`).

    Raises:
        UserError: a model that our cache cannot serve.
    """
    found, impossible = [], dict(evidence.left_out)
    for cell in evidence.cells:
        try:
            budget = deployed_budget(evidence.study, cell, load)
            spec = evidence.study.budget_spec(budget)
            held = memory.predict(model, cell.policy, spec, load.batch, load.prompt, load.new)
        except UserError as error:
            if cell.policy == FULL:
                raise
            impossible[cell] = f"cannot be deployed so: {error}"
            continue
        found.append(_candidate(evidence, cell, budget, held))
    return found, impossible


def deployed_budget(study: Study, cell: Cell, load: Load) -> str:
    """The cell's budget under the deployment's load: ratios become slots, once and for all.

    So a longer prompt takes no more memory than was counted on.
    """
    if cell.policy == FULL:
        return "100%"
    spec = study.budget_spec(cell.budget)
    return spec.with_total(spec.of(load.prompt + load.new).total)


def gaps(bench: Bench, cell: Cell, other: Cell) -> np.ndarray:
    """[P]: by how much the share of right samples differs, problem by problem."""
    return bench.cells[cell].by_problem - bench.cells[other].by_problem


def _candidate(evidence: Evidence, cell: Cell, budget: str, held: memory.Memory) -> Candidate:
    seed, full = evidence.study.seed, Cell(FULL, FULL)
    figures = {bench.label: _figures(bench, cell) for bench in evidence.benches}
    accuracies = [bench.cells[cell].by_problem for bench in evidence.benches]
    losses = [gaps(bench, cell, full) for bench in evidence.benches]
    mean = next(iter(figures.values()))
    if len(figures) > 1:
        mean = Figures(mean_over_tasks(accuracies, seed), mean_over_tasks(losses, seed))
    measured = [bench.cells[cell] for bench in evidence.benches]
    processor = sum(one.processor for one in measured)
    tokens = sum(int(one.lengths.sum()) for one in measured)
    cpu_ms = 1000 * processor / tokens if tokens else math.nan
    return Candidate(cell, budget, held, figures, mean, cpu_ms)


def _figures(bench: Bench, cell: Cell) -> Figures:
    mine, full = (bench.cells[c].correct.sum(axis=1) for c in (cell, Cell(FULL, FULL)))
    samples = np.full(len(mine), bench.samples)
    return Figures(
        accuracy=stats.proportion(mine.tolist(), samples.tolist()),
        loss=stats.paired_difference(mine.tolist(), full.tolist(), samples.tolist(), most=1),
    )


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those to which none is preferable in accuracy and bytes, least bytes first."""
    front: list[Candidate] = []
    ordered = sorted(candidates, key=lambda c: (c.held, -c.mean.accuracy.value, c.label))
    for candidate in ordered:
        if not front or candidate.mean.accuracy.value > front[-1].mean.accuracy.value:
            front.append(candidate)
    return front
