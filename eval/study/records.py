"""Result rows: what each entry may be, and which rows are a study's."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpolicies.errors import cut
from kvpolicies.files import whole_number

if TYPE_CHECKING:
    from kvpolicies.eval.study.config import Study
    from kvpolicies.eval.tasks.measures import Measure

FULL = "full"
"""The reference's policy in every row, and its budget: it has none."""


MOST = 1 << 53
"""The largest count: floats, in which figures are made of them, still tell it from the next."""


class Key(NamedTuple):
    """What a row is the result of."""

    policy: str
    budget: str
    problem: str
    sample: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Key":
        return cls(row["policy"], row["budget"], row["problem"], row["sample"])


Form = tuple[Callable[[Any], bool], str]
"""Whether an entry is right, and what it should be."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _listed(form: Form) -> Form:
    return (
        lambda value: isinstance(value, list) and all(map(form[0], value)),
        f"a list of {form[1]}",
    )


_COUNT: Form = (_is_count, "a whole number from 0 to 2^53")
_TEXT: Form = (lambda value: isinstance(value, str), "text")
_NUMBER: Form = (_is_number, "a finite number")
_SECONDS: Form = (lambda value: _is_number(value) and value >= 0, "seconds >= 0")
_BOOL: Form = (lambda value: isinstance(value, bool), "true or false")
_SHARE: Form = (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1")

KEYS: dict[str, Form] = {"policy": _TEXT, "budget": _TEXT, "problem": _TEXT, "sample": _COUNT}
WRITTEN: dict[str, Form] = {
    "finish": (lambda value: value in ("stop", "length"), "stop or length"),
    **dict.fromkeys(("length", "slots", "max_slots", "cache_bytes", "state_bytes"), _COUNT),
    "seconds": _SECONDS,
    "tokens": _listed(_COUNT),
    "text": _TEXT,
}
"""What every row holds beside its key; a task's own measures come on top."""
_HELD: dict[str, Form] = {
    "pieces": _listed(_TEXT),
    "prompt": _COUNT,
    "gap": _listed(_COUNT),
    "after": _listed(_COUNT),
    "levels": _listed((lambda value: isinstance(value, str) and value.isdecimal(), "digits")),
}
_CONTROL: dict[str, Form] = {"length": _COUNT, "cut": _BOOL}


def read(line: bytes, measures: Sequence["Measure"] = ()) -> dict[str, Any]:
    """The row in a line of a results file.

    Args:
        measures: of the row's task; their entries are looked at too.

    Raises:
        ValueError: what is wrong with it, for the middle of a sentence.
    """
    try:
        row = json.loads(line, parse_int=whole_number, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    check(row, measures)
    return row


def check(row: Mapping[str, Any], measures: Sequence["Measure"] = ()) -> None:
    """Checks one row as `read` does.

    Raises:
        ValueError: what is wrong with it, for the middle of a sentence.
    """
    graded = {name: form for measure in measures for name, form in _of_measure(measure).items()}
    _check({**KEYS, **WRITTEN, **graded}, row)
    optional = {"prompt_tokens": _COUNT, "asked": _COUNT, "mode": _TEXT, "processor": _SECONDS}
    _check({name: form for name, form in optional.items() if name in row}, row)
    if "held" in row:
        _check(_HELD, row["held"], "held: ")
    for name, control in _mapping(row.get("controls", {}), "controls").items():
        _check({**_CONTROL, **graded}, control, f"controls: {name}: ")


def _check(forms: Mapping[str, Form], found: Any, where: str = "") -> None:
    values = _mapping(found, where.removesuffix(": "))
    for name, (right, wanted) in forms.items():
        if name not in values:
            raise ValueError(f"{where}{name} is missing")
        if not right(values[name]):
            raise ValueError(f"{where}{name} must be {wanted}, got {cut(repr(values[name]), 40)}")


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be keys and values, got {cut(repr(value), 40)}")
    return value


def _of_measure(measure: "Measure") -> dict[str, Form]:
    share = measure.percent and not measure.per
    forms = {measure.key: _SHARE if share else _NUMBER}
    return forms | {name: _COUNT for name in (measure.per, measure.weight) if name}


def _no_number(text: str) -> None:
    raise ValueError(text)


@dataclass(frozen=True)
class Grid:
    """Which rows are a study's: its cells, each with all samples of all problems."""

    cells: frozenset[tuple[str, str]]
    problems: frozenset[str] | None
    """Their ids; None where nobody wrote them down."""
    samples: int
    longest: float
    """Most new tokens."""
    measures: tuple["Measure", ...]

    @classmethod
    def of(cls, study: "Study", problems: Iterable[str] | None) -> "Grid":
        """The grid of a resolved study."""
        cells = {(FULL, FULL)} | {(p, b) for p in study.policies for b in study.budgets}
        ids = None if problems is None else frozenset(problems)
        longest = study.max_new_tokens or math.inf
        return cls(frozenset(cells), ids, study.samples, longest, study.entry.measures)

    def check(self, row: Mapping[str, Any]) -> None:
        """Looks at a row that `read` let through.

        Raises:
            ValueError: why it is none of the study's, for the middle of a sentence.
        """
        key = Key.of(row)
        if (key.policy, key.budget) not in self.cells:
            raise ValueError(f"{key.policy} at {key.budget} is none of the study's cells")
        if self.problems is not None and key.problem not in self.problems:
            raise ValueError(f"problem {key.problem!r} is none of the study's")
        if key.sample >= self.samples:
            raise ValueError(f"sample {key.sample} is none of the study's {self.samples}")
        if row["length"] > self.longest:
            raise ValueError(f"length {row['length']} is above max_new_tokens {self.longest}")
