"""The Pareto set, and what each candidate fails, on the terminal."""

import math
from collections.abc import Sequence

from kvpolicies.eval.display import terminal
from kvpolicies.eval.display.bytesize import size
from kvpolicies.eval.select.candidates import Candidate, pareto
from kvpolicies.eval.select.decision import Choice
from kvpolicies.eval.select.evidence import Evidence
from kvpolicies.eval.select.explaining import faults, points
from kvpolicies.eval.study.summary import SPEED
from kvpolicies.eval.tasks.measures import ACCURACY


def print_tables(seen: Evidence, choice: Choice) -> None:
    """Two tables on standard output."""
    front = pareto(choice.candidates)
    rest = [c for c in choice.candidates if faults(choice, c)]
    load = choice.candidates[0].memory.batch
    title = f"Pareto set: accuracy (studies) against bytes (deployed, {load} rows)"
    for name, (headings, lines) in {
        title: _front(seen, choice, front),
        "What fails": (["candidate", "cache + state", "why"], _failures(choice, rest)),
    }.items():
        if lines:
            terminal.print_table(name, headings, lines, left=("why",))


def _front(
    seen: Evidence, choice: Choice, front: Sequence[Candidate]
) -> tuple[list[str], list[list[str]]]:
    labels = [bench.label for bench in seen.benches]
    headings = ["policy", "budget"]
    for name in labels:
        headings += [f"{name} %", "− full"]
    if len(labels) > 1:
        headings += ["mean %", "− full"]
    if choice.limits.on_accuracy:
        headings += ["− full at least" if choice.limits.least_accuracy is None else "slack"]
    headings += ["cache + state", "memory"]
    timed = any(not math.isnan(c.cpu_ms) for c in choice.candidates)
    headings += [SPEED, ""] if timed else [""]
    return headings, [_line(choice, c, labels, timed) for c in front]


def _line(choice: Choice, candidate: Candidate, labels: Sequence[str], timed: bool) -> list[str]:
    line = [candidate.cell.policy, "–" if candidate.is_full else _budget(candidate)]
    shown = [candidate.benches[name] for name in labels]
    for figures in shown + ([candidate.mean] if len(labels) > 1 else []):
        line.append(ACCURACY.show(figures.accuracy))
        line.append("" if candidate.is_full else ACCURACY.show(figures.loss, signed=True))
    if choice.limits.on_accuracy:
        line.append(_sure(choice, candidate))
    line += [size(candidate.held), size(candidate.memory.total)]
    if timed:
        line.append("–" if math.isnan(candidate.cpu_ms) else f"{candidate.cpu_ms:.3g}")
    return [*line, _mark(choice, candidate)]


def _budget(candidate: Candidate) -> str:
    mine = candidate.cell.budget
    return mine if candidate.budget == mine else f"{mine} = {candidate.budget}"


def _sure(choice: Choice, candidate: Candidate) -> str:
    tests = choice.tests[candidate.cell]
    if not tests:
        return "–"
    worst = min(tests, key=lambda test: test.slack)
    return points(worst.bound if choice.limits.least_accuracy is None else worst.slack)


def _mark(choice: Choice, candidate: Candidate) -> str:
    if candidate is choice.winner:
        return "chosen" if choice.verdict == "chosen" else "best estimate"
    return "fails" if faults(choice, candidate) else "admissible"


def _failures(choice: Choice, rest: Sequence[Candidate]) -> list[list[str]]:
    ordered = sorted(rest, key=lambda c: c.held)
    return [[c.label, size(c.held), "; ".join(faults(choice, c))] for c in ordered]
