"""Options of configs and policies: fields of a frozen dataclass, with what each may be beside it.

A config class calls `check_options(self, where)` in `__post_init__`; what concerns more than one
field it spells out there itself.
"""

from collections.abc import Sequence
from dataclasses import Field, field, fields
from math import isfinite
from typing import Any, get_args

from kvpolicies.errors import UserError, nearest, shown

MOST = 1 << 62
"""Of whole numbers that say nothing else: what the libraries below still count with."""


def option(
    default: Any,
    text: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    odd: bool = False,
    choices: Sequence[str] = (),
) -> Any:
    """A field with a default, the sentence that explains it, and its constraint.

    Args:
        least: its lower end, allowed itself.
        above: its lower end, not allowed itself.
        most: its upper end, allowed itself.
        below: its upper end, not allowed itself.
        odd: of a whole number, such as a pooling kernel with a middle.
        choices: the texts that it may be.
    """
    low = (least, True) if above is None else (above, False)
    high = (most, True) if below is None else (below, False)
    told = {"help": text, "ends": (low, high), "odd": odd, "choices": tuple(choices)}
    return field(default=default, metadata=told)


def check_options(config: Any, where: str = "") -> None:
    """Holds the fields of a dataclass against their constraints; None is left out.

    Args:
        where: stands before the field's name in an error, as in "rkv: mix".

    Raises:
        UserError: naming the field, what it may be, and its value.
    """
    for f in fields(config):
        value, choices = getattr(config, f.name), f.metadata.get("choices", ())
        if value is None or "ends" not in f.metadata:
            continue
        if choices and value not in choices:
            raise UserError(
                f"{where}{f.name} must be one of {', '.join(choices)}, got {shown(value)}"
                f"{_meant(str(value), choices)}"
            )
        if not choices and (wanted := _wanted(f, value)):
            raise UserError(f"{where}{f.name} must {wanted}, got {shown(value)}")


def _meant(word: str, known: Sequence[str]) -> str:
    """The choice that `word` is like, for the end of an error; empty where it is like none."""
    hint = nearest(word, known).partition("known:")[0].strip()
    return f"; {hint}" if hint else ""


def _wanted(f: Field, value: Any) -> str:
    """What a number must do that `value` does not; empty where there is nothing to say."""
    (low, low_inside), (high, high_inside) = f.metadata["ends"]
    if low is None and high is None:
        return ""
    if int in (f.type, *get_args(f.type)):
        if not isinstance(value, int) or isinstance(value, bool):
            return "be a whole number"
        if high is None and value > MOST:
            return f"be at most {MOST}"
    elif not isinstance(value, int | float) or not isfinite(value):
        return "be a finite number"
    above = low is None or value > low or (low_inside and value == low)
    under = high is None or value < high or (high_inside and value == high)
    if above and under:
        return "be odd" if f.metadata["odd"] and value % 2 == 0 else ""
    if low is not None and high is not None:
        return f"lie in {'(['[low_inside]}{low:g}, {high:g}{')]'[high_inside]}"
    if low is not None:
        return f"be {'at least' if low_inside else 'above'} {low:g}"
    return f"be {'at most' if high_inside else 'below'} {high:g}"
