"""The tasks: where problems come from, how a model is asked, how one text is graded.

A task is data: one row of `TASKS`. Problems of real tasks are read from JSON lines given by path;
the project ships none. Sources on the hub: gsm8k is `openai/gsm8k` (test split), math500 is
`HuggingFaceH4/MATH-500`, aime `HuggingFaceH4/aime_2024` or any set with `problem` and `answer`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicies.errors import UserError
from kvpolicies.eval import grading
from kvpolicies.eval import ledger as ledgers
from kvpolicies.eval.measures import ACCURACY, EXACT, KL, LOOKUPS, NLL, TOP1, Measure

if TYPE_CHECKING:
    from kvpolicies.eval.study import Study

Grades = dict[str, float]


@dataclass(frozen=True)
class Problem:
    """One problem. `solution` is what is forced (fidelity); `ledger` set for ledger problems."""

    id: str
    text: str
    answer: str
    solution: str = ""
    ledger: ledgers.LedgerProblem | None = None


@dataclass(frozen=True)
class Task:
    """One row of the table.

    `forced`: the solution is fed token by token and the policy's predictions are compared with
    full's; otherwise the model generates and `grade` reads its text. `instruction` follows the
    problem in the user's turn. `max_new_tokens` is None where each problem has its own.
    """

    name: str
    summary: str
    measures: tuple[Measure, ...]
    """What is reported, the main one first."""
    load: Callable[["Study"], list[Problem]]
    grade: Callable[[Problem, str], Grades]
    budgets: tuple[str, ...]
    problems: int
    batch_size: int
    max_new_tokens: int | None = None
    instruction: str = ""
    needs_data: bool = True
    data_hint: str = ""
    forced: bool = False
    chance: float = 0.0
    """Share of samples that a guess gets right."""


def read_problems(path: str | Path, keys: Sequence[str], limit: int | None) -> list[Problem]:
    """The first `limit` problems of a JSON lines file whose objects have `keys`.

    Raises:
        UserError: no such file, a line that is no JSON object, a key missing or empty, an id
            given twice; each names the file and the line.
    """
    try:
        # Not splitlines: a raw U+2028 inside a JSON string is no end of line.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"data file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"data file {path}: not UTF-8 text") from None
    problems: dict[str, Problem] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        problem = _read_problem(line, f"{path}:{number}", keys)
        if problem.id in problems:
            raise UserError(f"{path}:{number}: id {problem.id!r} was given before")
        problems[problem.id] = problem
    if not problems:
        raise UserError(f"data file {path}: no problems in it")
    return list(problems.values())[:limit]


def fingerprint(problems: Sequence[Problem]) -> str:
    """A short hash of ids, texts and answers: tells whether two runs had the same problems."""
    digest = hashlib.sha256()
    for item in problems:
        digest.update(json.dumps([item.id, item.text, item.answer, item.solution]).encode())
    return digest.hexdigest()[:16]


def _read_problem(line: str, where: str, keys: Sequence[str]) -> Problem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: malformed JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # endless numbers, endless brackets
        raise UserError(f"{where}: malformed JSON ({type(error).__name__})") from None
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected a JSON object with {', '.join(keys)}")
    for key in keys:
        if key not in record:
            raise UserError(f"{where}: key {key!r} is missing; expected {', '.join(keys)}")
        if not isinstance(record[key], str | int | float):
            kind = type(record[key]).__name__
            raise UserError(f"{where}: {key!r} must be text or a number, got {kind}")
        if not str(record[key]).strip():
            raise UserError(f"{where}: {key!r} is empty")
    if any("\ud800" <= c <= "\udfff" for key in keys for c in str(record[key])):
        raise UserError(f"{where}: half of a surrogate pair is no text")
    return Problem(
        id=str(record["id"]),
        text=str(record["problem"]),
        answer=str(record.get("answer", "")),
        solution=str(record.get("solution", "")),
    )


def _from_file(*keys: str) -> Callable[["Study"], list[Problem]]:
    return lambda study: read_problems(study.data, keys, study.problems)


def _ledgers(study: "Study") -> list[Problem]:
    made = []
    for number in range(study.problems or TASKS["ledger"].problems):
        problem = ledgers.make_problem(number, length=study.length)
        made.append(
            Problem(f"ledger-{number}", problem.prompt, problem.answer, problem.trace, problem)
        )
    return made


def _grade_ledger(problem: Problem, text: str) -> Grades:
    assert problem.ledger is not None
    result = ledgers.grade(problem.ledger, text.split())
    return {
        "correct": int(result.exact),
        "lookups_right": result.lookups_right,
        "lookups": result.lookups,
    }


def _grade_number(problem: Problem, text: str) -> Grades:
    return {"correct": int(grading.is_correct(text, problem.answer, last_number=True))}


def _grade_boxed(problem: Problem, text: str) -> Grades:
    return {"correct": int(grading.is_correct(text, problem.answer))}


def _no_grade(problem: Problem, text: str) -> Grades:
    raise AssertionError("fidelity compares predictions and grades no text")


_BOXED = "\n\nReason step by step, and put the final answer within \\boxed{}."
_LINES = "JSON lines with id, problem, answer"

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="ledger",
            summary="synthetic traces that look back at plan and bindings at every step",
            measures=(EXACT, LOOKUPS),
            load=_ledgers,
            grade=_grade_ledger,
            budgets=("69", "101", "133"),
            problems=48,
            batch_size=48,
            needs_data=False,
            chance=0.1,
        ),
        Task(
            name="gsm8k",
            summary="grade-school word problems, answers graded by math-verify",
            measures=(ACCURACY,),
            load=_from_file("id", "problem", "answer"),
            grade=_grade_number,
            budgets=("96", "128", "192"),
            problems=48,
            batch_size=16,
            max_new_tokens=512,
            instruction=_BOXED,
            data_hint=f"{_LINES} (the problems are openai/gsm8k on the hub)",
        ),
        Task(
            name="math500",
            summary="competition problems, answers graded by math-verify",
            measures=(ACCURACY,),
            load=_from_file("id", "problem", "answer"),
            grade=_grade_boxed,
            budgets=("256", "512", "1024"),
            problems=48,
            batch_size=16,
            max_new_tokens=4096,
            instruction=_BOXED,
            data_hint=f"{_LINES} (the problems are HuggingFaceH4/MATH-500 on the hub)",
        ),
        Task(
            name="aime",
            summary="olympiad problems with whole-number answers, graded by math-verify",
            measures=(ACCURACY,),
            load=_from_file("id", "problem", "answer"),
            grade=_grade_boxed,
            budgets=("1024", "2048", "4096"),
            problems=30,
            batch_size=16,
            max_new_tokens=32768,
            instruction=_BOXED,
            data_hint=f"{_LINES} (for instance HuggingFaceH4/aime_2024 on the hub)",
        ),
        Task(
            name="fidelity",
            summary="predictions against full's, fed the worked solution token by token",
            measures=(KL, TOP1, NLL),
            load=_from_file("id", "problem", "solution"),
            grade=_no_grade,
            budgets=("50%", "25%", "12.5%"),
            problems=8,
            batch_size=8,
            max_new_tokens=512,
            data_hint="JSON lines with id, problem, solution "
            "(for instance HuggingFaceH4/MATH-500 on the hub)",
            forced=True,
        ),
    )
}
