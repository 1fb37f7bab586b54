r"""The tree of one expression, and what can be said of it without an algebra system.

A tree is nested tuples, the first entry its kind:
    ("num", Fraction)  ("dec", "0.50")  ("sym", "x")  ("const", "pi" | "e" | "i" | "oo")  ("pm", 1)
    ("add", a, b)  ("mul", a, b)  ("div", a, b)  ("mixed", a, b)  ("neg", a)  ("pow", a, b)
    ("root", index, a)  ("deg", a)  ("pct", a)  ("fn", name, *arguments)  ("call", name, *arguments)
    ("matrix", (row, ...))
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

Tree = tuple[Any, ...]

_MOST_DIGITS = 2000  # of a number that is worked out here; longer ones are left to the engine


class Unread(Exception):
    """What stands there is not one expression, or not for certain."""


class Decimal(NamedTuple):
    """A number as it was written with a decimal point."""

    value: Fraction
    unit: Fraction
    """Of its last place."""
    digits: int
    """Significant ones."""


def literal(text: str) -> Fraction:
    """The value of a number: 12, 1.50, .5, 6.7e-5, 0.1(6) with the block that repeats.

    Raises:
        Unread: longer than any answer.
    """
    if len(text) > _MOST_DIGITS or abs(int(text.lower().partition("e")[2] or 0)) > _MOST_DIGITS:
        raise Unread
    if "(" not in text:
        return Fraction(text)
    fixed, _, block = text.removesuffix(")").partition("(")
    places = len(fixed.partition(".")[2])
    return Fraction(f"0{fixed}0") + Fraction(int(block), (10 ** len(block) - 1) * 10**places)


def signed(sign: str, tree: Tree) -> Tree:
    """`tree` behind one of + - ± ∓."""
    if sign in "±∓":
        return ("mul", ("pm", 1 if sign == "±" else -1), tree)
    return ("neg", tree) if sign == "-" else tree


def in_base(digits: Fraction, base: Tree) -> Tree:
    """The number that `digits` mean in `base`, as in 52_8.

    Raises:
        Unread: no base, or a digit that it has not.
    """
    shown = rational(base)
    if shown is None or shown.denominator != 1 or not 2 <= shown <= 10:
        raise Unread
    try:
        return ("num", Fraction(int(str(digits), int(shown))))
    except ValueError:
        raise Unread from None


def parts(tree: Tree) -> Iterator[Tree]:
    """`tree` and every tree in it."""
    yield tree
    for entry in tree[1:]:
        if isinstance(entry, tuple):
            yield from (
                parts(entry)
                if entry and isinstance(entry[0], str)
                else (part for row in entry for cell in row for part in parts(cell))
            )


def signs(tree: Tree) -> list[Tree]:
    """`tree` for both values of plus-minus, or itself.

    Raises:
        Unread: two signs that may differ.
    """
    count = sum(part[0] == "pm" for part in parts(tree))
    if count == 0:
        return [tree]
    if count > 1 and ("pm", -1) not in parts(tree):  # two signs, or four?
        raise Unread
    return [_with_sign(tree, sign) for sign in (1, -1)]


def _with_sign(tree: Any, sign: int) -> Any:
    if not isinstance(tree, tuple):
        return tree
    if tree and tree[0] == "pm":
        return ("num", Fraction(sign * tree[1]))
    return tuple(_with_sign(entry, sign) for entry in tree)


def decimal(tree: Tree) -> Decimal | None:
    """`tree` as a decimal: with its sign, or times a power of ten; None if it is anything else."""
    kind = tree[0]
    if kind == "dec":
        mantissa, _, exponent = tree[1].lower().partition("e")
        scale = Fraction(10) ** int(exponent or 0)
        shown = mantissa.replace(".", "").lstrip("0")
        unit = scale / 10 ** len(mantissa.partition(".")[2])
        return Decimal(literal(tree[1]), unit, len(shown))
    if kind == "neg" and (inner := decimal(tree[1])):
        return inner._replace(value=-inner.value)
    if kind == "mul" and tree[2][0] == "pow" and tree[2][1] == ("num", Fraction(10)):
        inner, scale = decimal(tree[1]), rational(tree[2])
        if inner and scale:
            return Decimal(inner.value * scale, inner.unit * scale, inner.digits)
    return None


def stands_for(shown: Decimal, exact: Fraction, *, least: int = 6) -> bool:
    """Whether `shown` is `exact` rounded or cut off, to `least` digits or more."""
    if shown.digits < least or (shown.value < 0) != (exact < 0):
        return False
    beyond = abs(exact) - abs(shown.value)
    return 2 * abs(beyond) <= shown.unit or 0 <= beyond < shown.unit


def rational(tree: Tree) -> Fraction | None:
    """The exact value of numbers under plain arithmetic; None if it takes more than that."""
    try:
        return _rational(tree)
    except (ZeroDivisionError, OverflowError):
        return None


def _rational(tree: Tree) -> Fraction | None:
    kind = tree[0]
    if kind == "num":
        return tree[1]
    if kind == "dec":
        return literal(tree[1])
    if kind not in ("add", "mixed", "mul", "div", "neg", "pct", "pow"):
        return None
    values = [_rational(part) for part in tree[1:]]
    if None in values:
        return None
    if kind in ("neg", "pct"):
        return values[0] * (-1 if kind == "neg" else Fraction(1, 100))  # type: ignore[operator]
    left, right = values
    assert left is not None and right is not None
    if kind == "pow":
        return _power(left, right)
    return {"add": left.__add__, "mixed": left.__add__, "mul": left.__mul__,
            "div": left.__truediv__}[kind](right)  # fmt: skip


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        return None
    size = math.log10(max(abs(base.numerator), base.denominator, 1)) * abs(exponent)
    return base ** int(exponent) if size < _MOST_DIGITS else None
