"""The tasks: where problems come from, how a model is asked, how one text is graded.

A task is data: a YAML file, of ours in `entries/` or of yours by its path, with the keys of `Task`.
Problems are read from JSON lines given by path, else from the hub; the project ships none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpolicies.config import from_mapping, read_yaml
from kvpolicies.errors import UserError, nearest
from kvpolicies.eval.sandbox.running import Limits, check
from kvpolicies.eval.tasks import grading
from kvpolicies.eval.tasks import multiple_choice as choices
from kvpolicies.eval.tasks.graders import GRADERS, Grader
from kvpolicies.eval.tasks.graders import Grades as Grades
from kvpolicies.eval.tasks.hub import Hub, rows
from kvpolicies.eval.tasks.measures import Measure
from kvpolicies.eval.tasks.problems import Columns, problems_of
from kvpolicies.eval.tasks.problems import Problem as Problem
from kvpolicies.eval.tasks.problems import fingerprint as fingerprint
from kvpolicies.eval.tasks.problems import read_problems as read_problems
from kvpolicies.options import check_options, option
from kvpolicies.registry import load

ENTRIES = Path(__file__).parent / "entries"
_PARTS = {"hub": Hub, "columns": Columns, "sandbox": Limits}
_SHOWN = ("problem", "choices", "starter", "function")


@dataclass(frozen=True)
class Task:
    """One task; the keys of its YAML file are these fields, and `base`: a task to start from."""

    name: str = option("", "what rows and reports call it; default: the file's name")
    summary: str = option("", "one line for reports")
    grader: str = option("math", f"{', '.join(GRADERS)}", choices=tuple(GRADERS))
    extract: tuple[str, ...] = option(
        (),
        f"how the answer is found, tried in turn: {', '.join(grading.WAYS)}, or a regular "
        "expression with one group, whose last match counts",
    )
    prompt: str = option(
        "{{ problem }}", f"the user's turn, a Jinja template of {', '.join(_SHOWN)}"
    )
    hub: Hub = field(default_factory=Hub)
    columns: Columns = field(default_factory=Columns)
    sandbox: Limits = field(default_factory=Limits)
    budgets: tuple[str, ...] = option(("256", "512", "1024"), "default budgets")
    problems: int = option(48, "default number of problems", least=1)
    batch_size: int = option(16, "default rows decoded at once", least=1)
    max_new_tokens: int | None = option(
        None, "most new tokens; ledger problems have their own", least=1
    )
    chance: float = option(0.0, "share of samples that a guess gets right", least=0, below=1)

    def __post_init__(self) -> None:
        check_options(self)
        for way in self.extract:
            try:
                grading.check_way(way)
            except UserError as error:
                raise UserError(f"extract {error}") from None
        if self.extract and not self._kind.ways:
            raise UserError(f"grader {self.grader} looks for no answer; leave extract out")
        if not self.budgets:
            raise UserError("budgets is empty; leave it out for the usual ones")
        _check_template(self.prompt)
        if self.needs_data and self.max_new_tokens is None:
            raise UserError("max_new_tokens is missing")

    @property
    def _kind(self) -> Grader:
        return GRADERS[self.grader]

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What is reported, the main one first."""
        return self._kind.measures

    @property
    def ways(self) -> tuple[str, ...]:
        """How the answer is found in a text."""
        return self.extract or self._kind.ways

    @property
    def forced(self) -> bool:
        """Whether the solution is fed token by token, and predictions are compared with full's."""
        return self._kind.forced

    @property
    def needs_data(self) -> bool:
        """Whether problems come from outside."""
        return not self._kind.make

    @property
    def keys(self) -> tuple[str, ...]:
        """Fields that every problem has."""
        return ("id", "problem", *self._kind.needs)

    @property
    def data_hint(self) -> str:
        """What a file of problems holds."""
        where = f" (the problems are {self.hub.id} on the hub)" if self.hub.id else ""
        return f"JSON lines with {', '.join(self.keys)}{where}"

    def load(self, count: int | None, length: int, data: str | None) -> list[Problem]:
        """Problems as they are asked.

        Args:
            count: how many; None = all that there are, of made ones the task's default.
            length: tokens of each, where they are made.
            data: a file of them, where they are read; None = the task's own on the hub.

        Raises:
            UserError: data that is not there or not in order; code that cannot be run isolated.
        """
        if self._kind.make:
            return load(self._kind.make)(count or self.problems, length)
        if self._kind.isolated:
            check(self.sandbox)
        if data:
            found = read_problems(data, self.keys, count, self.columns)
        else:
            found = problems_of(rows(self.name, self.hub)[:count], self.keys, self.columns)
        return [self.asked(problem) for problem in found]

    def asked(self, problem: Problem) -> Problem:
        """`problem` with its choices in order and the user's whole turn as its text.

        Raises:
            UserError: for choices that are not in order, naming the problem.
        """
        if self._kind.prepare:
            try:
                problem = load(self._kind.prepare)(problem)
            except UserError as error:
                raise UserError(f"problem {problem.id!r}: {error}") from None
        text = self._template.render(
            problem=problem.text,
            choices=choices.lettered(problem.choices),
            starter=problem.starter,
            function=problem.function,
        )
        limits = f" {self.sandbox}" if self._kind.isolated else ""
        rule = f"{self.grader}{self._kind.edition} {' '.join(self.ways)}{limits}"
        return replace(problem, text=text, rule=rule)

    def grade(self, problem: Problem, text: str) -> Grades:
        """Grades of one sample's text, by the names of `measures`."""
        return load(self._kind.grade)(self, problem, text)

    def answers(self, text: str) -> bool:
        """Whether a text that breaks off has given its answer by then."""
        return load(self._kind.answers)(self, text)

    @cached_property
    def _template(self) -> Any:
        return _environment().from_string(self.prompt)


def find_task(name: str) -> Task:
    """The task of a name, or in a YAML file.

    Raises:
        UserError: no such task (naming the nearest) or file, an unknown key, a bad value.
    """
    if name in list(TASKS):
        return TASKS[name]
    if Path(name).suffix in (".yaml", ".yml"):
        return _read(Path(name))
    raise UserError(f"task {name!r}: {nearest(name, list(TASKS))}, or a file my_task.yaml")


class _Shipped(Mapping[str, Task]):
    """The package's tasks by name; each is read when it is first asked for."""

    def __init__(self) -> None:
        self._read: dict[str, Task | None] = dict.fromkeys(
            sorted(file.stem for file in ENTRIES.glob("*.yaml"))
        )

    def __getitem__(self, name: str) -> Task:
        task = self._read[name] or _read(ENTRIES / f"{name}.yaml")
        self._read[name] = task
        return task

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


TASKS: Mapping[str, Task] = _Shipped()


def _read(path: Path) -> Task:
    values = _values(path, ())
    parts = {
        key: from_mapping(cls, values[key], f"{path}: {key}")
        for key, cls in _PARTS.items()
        if key in values
    }
    plain = {key: value for key, value in values.items() if key not in parts}
    if isinstance(way := plain.get("extract"), str) and "(" in way:
        plain["extract"] = [way]  # an expression's own commas divide nothing
    return replace(from_mapping(Task, {"name": path.stem, **plain}, str(path)), **parts)


def _values(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """The file's mapping, over that of its `base`; nested keys one by one."""
    values = read_yaml(path)
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: expected keys and values, got {type(values).__name__}")
    values = dict(values)
    base = values.pop("base", None)
    if base is None:
        return values
    below = ENTRIES / f"{base}.yaml" if base in list(TASKS) else path.parent / str(base)
    if path in above or len(above) > 9:
        raise UserError(f"{path}: base leads back to itself")
    if not below.is_file():
        raise UserError(f"{path}: base {base!r}: {nearest(str(base), list(TASKS))}, or a file")
    merged = _values(below, (*above, path))
    for key, value in values.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = {**old, **value} if both else value  # type: ignore[dict-item]
    return merged


def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    return SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)


def _check_template(text: str) -> None:
    from jinja2 import TemplateSyntaxError, meta

    environment = _environment()
    try:
        names = meta.find_undeclared_variables(environment.parse(text))
    except TemplateSyntaxError as error:
        raise UserError(f"prompt: no valid template ({error.message})") from None
    for name in sorted(names - set(_SHOWN)):
        raise UserError(f"prompt: unknown {name!r}: {nearest(name, list(_SHOWN))}")
