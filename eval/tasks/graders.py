"""The graders: what a text must be to count, and what a task of each kind reports.

A table of strings, so that a task costs only its own grader. Each function takes (task, problem,
text) and returns grades by the names of its measures.
"""

import string
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvpolicies import room
from kvpolicies.eval.sandbox import running as sandbox
from kvpolicies.eval.tasks import code_tests, grading
from kvpolicies.eval.tasks import ledger as ledgers
from kvpolicies.eval.tasks import multiple_choice as choices
from kvpolicies.eval.tasks.measures import ACCURACY, EXACT, KL, LOOKUPS, NLL, TOP1, Measure
from kvpolicies.eval.tasks.problems import Problem

if TYPE_CHECKING:
    from kvpolicies.eval.tasks.task import Task

Grades = dict[str, float]
_WORD = 16
"""Bytes of a ledger problem's word, at the least, in its text and in its parts."""


@dataclass(frozen=True)
class Grader:
    """One kind of grade."""

    grade: str
    """"module:function"."""
    needs: tuple[str, ...]
    """Fields that a problem must have beside id and problem."""
    measures: tuple[Measure, ...] = (ACCURACY,)
    """What is reported, the main one first."""
    ways: tuple[str, ...] = ()
    """How the answer is found in the text, unless the task says otherwise (grading.WAYS)."""
    edition: str = ""
    """Which way of grading this is, where it has changed: results do not continue across."""
    answers: str = "kvpolicies.eval.tasks.graders:finds_answer"
    """"module:function" of (task, text): whether a text that breaks off has given its answer."""
    make: str = ""
    """"module:function" of (number, length) that makes so many problems of so many tokens; "" =
    they come from a file or from the hub."""
    prepare: str = ""
    """"module:function" of a problem as it is read: the problem as it is asked."""
    isolated: bool = False
    """Whether it runs what a model wrote, in the task's sandbox."""
    forced: bool = False
    """Whether the solution is fed token by token, and predictions are compared with full's."""


_HERE = "kvpolicies.eval.tasks.graders"

GRADERS: dict[str, Grader] = {
    "math": Grader(f"{_HERE}:grade_math", ("answer",), ways=grading.MATHS, edition=" exact"),
    "choice": Grader(
        f"{_HERE}:grade_choice",
        ("answer", "choices"),
        ways=("boxed", "answer_line", "bracketed"),
        prepare=f"{_HERE}:choices_in_order",
    ),
    "code": Grader(
        f"{_HERE}:grade_code", ("tests",), answers=f"{_HERE}:closes_block", isolated=True
    ),
    "ledger": Grader(
        f"{_HERE}:grade_ledger",
        (),
        (EXACT, LOOKUPS),
        answers=f"{_HERE}:answers_ledger",
        make=f"{_HERE}:make_ledgers",
    ),
    "fidelity": Grader(f"{_HERE}:grade_nothing", ("solution",), (KL, TOP1, NLL), forced=True),
}


def make_ledgers(count: int, length: int) -> list[Problem]:
    """The first `count` ledger problems of `length` tokens.

    Raises:
        UserError: for more than fit into memory.
    """
    made = []
    room.check(count * length * _WORD, f"{count:,} problems of {length} tokens", "lower problems")
    from tqdm import tqdm

    # Thousands take a while: a bar is shown after two seconds, and a line in a log now and then.
    often = 0.2 if sys.stderr.isatty() else 20.0
    for number in tqdm(range(count), "problems", leave=False, delay=2, mininterval=often):
        problem = ledgers.make_problem(number, length=length)
        made.append(
            Problem(f"ledger-{number}", problem.prompt, problem.answer, problem.trace, problem)
        )
    return made


def choices_in_order(problem: Problem) -> Problem:
    """`problem` with its choices in the order in which they are shown, and the right letter.

    Raises:
        UserError: for fewer than two choices, or more than letters.
    """
    shown, letter = choices.shuffled(problem.text, problem.answer, problem.choices)
    return replace(problem, choices=shown, answer=letter)


def grade_math(task: "Task", problem: Problem, text: str) -> Grades:
    """The answer's value."""
    return {"correct": int(grading.is_correct(text, problem.answer, task.ways))}


def grade_choice(task: "Task", problem: Problem, text: str) -> Grades:
    """The letter that the first way finds; several ways may find a box without one."""
    count = len(problem.choices)
    found = (choices.letter_of(given, count) for given in grading.candidates(text, task.ways))
    letter = next((letter for letter in found if letter), None)
    if letter is None and text.strip() in tuple(string.ascii_uppercase[:count]):
        letter = text.strip()
    return {"correct": int(letter == problem.answer)}


def grade_code(task: "Task", problem: Problem, text: str) -> Grades:
    """The last block of code passes every test, each in a sandbox of its own."""
    source = last_block(text)
    passed = source is not None and all(
        _passes(source, test, problem.function, task.sandbox) for test in problem.tests
    )
    return {"correct": int(passed)}


def grade_ledger(task: "Task", problem: Problem, text: str) -> Grades:
    """Exact trace, and lookups that are right."""
    assert problem.ledger is not None
    result = ledgers.grade(problem.ledger, text.split())
    return {
        "correct": int(result.exact),
        "lookups_right": result.lookups_right,
        "lookups": result.lookups,
    }


def grade_nothing(task: "Task", problem: Problem, text: str) -> Grades:
    """Never called."""
    raise AssertionError("fidelity compares predictions and grades no text")


def finds_answer(task: "Task", text: str) -> bool:
    """A closed box, or a whole line that says it is the answer.

    What else finds an answer, such as the last number, finds anything so far in a text that breaks
    off.
    """
    lines = text[: text.rfind("\n") + 1]
    marked = {"boxed": text, "hashes": lines, "answer_line": lines}
    return any(grading.WAYS[way](part) for way, part in marked.items() if way in task.ways)


def closes_block(task: "Task", text: str) -> bool:
    """A block of code that is closed."""
    return last_block(text) is not None


def answers_ledger(task: "Task", text: str) -> bool:
    """The word `answer` and one after it."""
    return "answer" in text.split()[:-1]


def last_block(text: str) -> str | None:
    """The last closed block between lines of three backticks; an open one was cut off."""
    block: list[str] | None = None
    found, fence = None, ""
    for line in text.splitlines():
        mark = line.strip()
        if block is None:
            if mark.startswith("```"):
                fence = "`" * (len(mark) - len(mark.lstrip("`")))
                block = []
        elif mark.startswith(fence) and not mark.strip("`"):
            found, block = "\n".join(block), None
        else:
            block.append(line)
    return found


def _passes(source: str, test: code_tests.Test, function: str, limits: sandbox.Limits) -> bool:
    made = sandbox.run(source, test.input, limits, function)
    same = code_tests.same_value if function else code_tests.same_output
    return made.status == "ok" and same(test.output, made.output)
