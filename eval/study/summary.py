"""From result rows to one summary a cell (policy at budget), and to summary.csv."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpolicies import files
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.eval.study import controls
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.controls import Control
from kvpolicies.eval.study.lookahead import MARK
from kvpolicies.eval.study.results import FULL as FULL
from kvpolicies.eval.tasks.grading import ends_in_loop
from kvpolicies.eval.tasks.measures import Row

NAME = "summary.csv"
SPEED = "CPU ms/token"
"""The heading of `cpu_ms`, wherever it is shown."""

Cells = dict[tuple[str, str], list[Row]]
"""Rows by (policy, budget)."""


@dataclass(frozen=True)
class Summary:
    """One cell: a `policy` at a `budget`, over so many `problems` and `samples` of them together.

    `cache_bytes` and `state_bytes` are those of one row of the batch (the largest seen), all layers
    together; `mean_length` counts new tokens, and `tokens_per_second` those of all samples over the
    time that counts as theirs.
    """

    policy: str
    budget: str
    problems: int
    samples: int
    values: dict[str, Interval]
    """By measure."""
    differences: dict[str, Interval]
    """To full, paired by problem; by measure, for those that are compared so."""
    pass_at: dict[int, Interval]
    """pass@k by k (2, 4, 8, ... and the number of samples) of a task that is right or wrong; empty
    with one sample a problem, whose pass@1 is the measure itself."""
    slots: float
    """Budget in slots, mean over the rows (a ratio differs from row to row)."""
    max_slots: int
    """The most slots a head held in any row."""
    over_budget: int
    """Rows whose heads ever held more than their budget: 0, or the cache is wrong."""
    cache_bytes: int
    state_bytes: int
    mean_length: float
    cut: int
    """Samples cut off at the limit of new tokens."""
    truncated: float
    """The same as a share of samples."""
    looping: float
    """Share of samples that were cut off while repeating themselves."""
    lookahead: bool
    """Its policy was told what is to come (lookahead.py): no policy to deploy."""
    tokens_per_second: float
    """On the wall, and so whatever else the machine did."""
    cpu_ms: float
    """Milliseconds of the processor a new token, all threads; nan where it does not tell: of rows
    that were made on a GPU, or by an older version, or by a policy that looks ahead."""
    beyond: bool
    """Held more slots than were asked for: a paper's own rule grants itself what it needs."""
    controls: dict[str, Control] = field(default_factory=dict)
    """Full's own samples, cut to this cell's lengths or memory (controls.py); empty for full and
    lookaheads, and where nothing is generated."""

    @property
    def label(self) -> str:
        """The policy's name, marked if it is a lookahead."""
        return f"{self.policy} {MARK}" if self.lookahead else self.policy

    @property
    def is_full(self) -> bool:
        """Whether this is the reference."""
        return self.policy == FULL


def summarise(study: Study, rows: Sequence[Row]) -> list[Summary]:
    """One summary a cell, `full` first, then by policy and budget in the study's order."""
    cells = by_cell(rows)
    full = cells.get((FULL, FULL), [])
    order = [(FULL, FULL)] + [(p, b) for p in study.policies for b in study.budgets]
    return [_one(study, cells[key], full) for key in order if key in cells]


def by_cell(rows: Sequence[Row]) -> Cells:
    """The rows of each cell, in the order of problem and sample, whoever computed them when."""
    cells: Cells = {}
    for row in sorted(rows, key=lambda row: (row["problem"], row["sample"])):
        cells.setdefault((row["policy"], row["budget"]), []).append(row)
    return cells


def write_csv(path: Path, study: Study, summaries: Sequence[Summary]) -> None:
    """One line a cell; every measure with the ends of its interval, its difference to full, pass@k.

    An entry that a cell lacks, such as pass@8 of a study with 4 samples, has no column; full has no
    controls, and nan there.
    """
    names = ("", "_low", "_high")
    measures = study.entry.measures
    header = ["policy", "budget", "problems", "samples"]
    for measure in measures:
        header += [measure.key + end for end in names]
    for measure in measures:
        if measure.against_full:
            header += [f"{measure.key}_minus_full{end}" for end in names]
    passes = sorted({k for cell in summaries for k in cell.pass_at})
    header += [f"pass_at_{k}{end}" for k in passes for end in names]
    plain = ("slots", "max_slots", "over_budget", "cache_bytes", "state_bytes", "mean_length",
             "truncated", "looping", "lookahead", "cpu_ms", "tokens_per_second")  # fmt: skip
    cut = [controls.columns(measures, cell.controls) for cell in summaries]
    extra = list(dict.fromkeys(name for entries in cut for name in entries))
    lines: list[list[object]] = [[*header, *extra, *plain]]
    for cell, own in zip(summaries, cut, strict=True):
        line: list[object] = [cell.policy, cell.budget, cell.problems, cell.samples]
        nothing = Interval(math.nan, math.nan, math.nan)
        shown = [*cell.values.values(), *cell.differences.values()]
        shown += [cell.pass_at.get(k, nothing) for k in passes]
        line += [f"{end:.6g}" for interval in shown for end in interval]
        line += [f"{own.get(name, math.nan):.6g}" for name in extra]
        lines.append(line + [f"{getattr(cell, name):.6g}" for name in plain])
    files.write_csv(path, lines)


def _one(study: Study, rows: Sequence[Row], full: Sequence[Row]) -> Summary:
    measures, seed = study.entry.measures, study.seed
    count = len(rows)
    cut = [row for row in rows if row["finish"] == "length" and not study.entry.forced]
    seconds = sum(row["seconds"] for row in rows)
    return Summary(
        policy=rows[0]["policy"],
        budget=rows[0]["budget"],
        problems=len({row["problem"] for row in rows}),
        samples=count,
        values={item.key: item.estimate(rows, seed) for item in measures},
        differences={
            item.key: item.difference(rows, full) for item in measures if item.against_full
        },
        pass_at=measures[0].pass_at(rows),
        slots=sum(row["slots"] for row in rows) / count,
        max_slots=max(row["max_slots"] for row in rows),
        over_budget=sum(row["max_slots"] > row["slots"] for row in rows),
        cache_bytes=max(row["cache_bytes"] for row in rows),
        state_bytes=max(row["state_bytes"] for row in rows),
        mean_length=sum(row["length"] for row in rows) / count,
        cut=len(cut),
        truncated=len(cut) / count,
        lookahead=any(row.get("mode") for row in rows),
        looping=sum(ends_in_loop(row["tokens"]) for row in cut) / count,
        beyond=any(row["max_slots"] > row.get("asked", row["slots"]) for row in rows),
        controls=controls.of_cell(measures, rows, seed),
        cpu_ms=_cpu_ms(rows),
        tokens_per_second=sum(row["length"] for row in rows) / seconds if seconds > 0 else 0.0,
    )


def _cpu_ms(rows: Sequence[Row]) -> float:
    tokens = sum(row["length"] for row in rows)
    if not tokens or any("processor" not in row or row.get("mode") for row in rows):
        return math.nan
    return 1000 * sum(row["processor"] for row in rows) / tokens
