"""Rows of tokens cut into pieces: at signs outside of brackets, names, units, thousands."""

import re
from collections.abc import Sequence
from fractions import Fraction

from kvpolicies.eval.tasks.maths import units
from kvpolicies.eval.tasks.maths.tokens import Token
from kvpolicies.eval.tasks.maths.trees import Unread

Tokens = Sequence[Token]

_OPENING = frozenset(("(", "[", "{", r"\{", "⟨", "⌊", "⌈"))
_CLOSING = frozenset((")", "]", "}", r"\}", "⟩", "⌋", "⌉"))
_LISTS = frozenset(("(", "[", r"\{", "⟨"))
_MONEY = ("$", "€", "£")
_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
_ORDINALS = frozenset(("st", "nd", "rd", "th"))


def depths(found: Tokens) -> list[int]:
    """How many brackets are open around each token; a bracket is outside of itself."""
    depth, made = 0, []
    for kind, text, _ in found:
        opens = kind == "begin" or (kind == "op" and text in _OPENING)
        closes = kind == "end" or (kind == "op" and text in _CLOSING)
        depth -= closes
        made.append(depth)
        depth += opens
    return made


def split(found: Tokens, signs: Sequence[str]) -> tuple[list[str], list[Tokens]]:
    """The signs of these that stand outside of brackets, and what is between them."""
    marks: list[str] = []
    sides: list[Tokens] = []
    start = 0
    for at, (token, depth) in enumerate(zip(found, depths(found), strict=True)):
        if depth == 0 and token.kind == "op" and token.text in signs:
            marks.append(token.text)
            sides.append(found[start:at])
            start = at + 1
    return marks, [*sides, found[start:]]


def bracketed(found: Tokens) -> bool:
    """Whether one pair of brackets of a list is around it all."""
    if len(found) < 2 or found[0].kind != "op" or found[0].text not in _LISTS:
        return False
    inside = depths(found)
    return found[-1].text in _CLOSING and inside[-1] == 0 and all(d > 0 for d in inside[1:-1])


def is_symbol(found: Tokens) -> bool:
    """Whether this is one letter, perhaps with an index."""
    bare = _without_indices(found)
    return len(bare) == 1 and bare[0].kind == "sym"


def is_name(found: Tokens) -> bool:
    """Whether a value may be said to be this: letters, and no number but as index or argument.

    x, x_1, f(2), f^{-1}(x), P(A), a + b, |AB|, sin A, (x, y); not -x, 2x, x^2, ln x.
    """
    if bracketed(found):
        return all(is_symbol(side) for side in split(found[1:-1], (",",))[1])
    bare = _without_indices(found)
    if not bare or bare[0].text == "-":
        return False
    called = bare[6:] if [t.text for t in bare[1:6]] == ["^", "{", "-", "1", "}"] else bare[1:]
    if bare[0].kind == "sym" and bracketed(called) and called[0].text == "(":
        return True
    euler = len(bare) == 1 and bare[0][:2] in (("const", "e"), ("const", "i"))
    letters = any(token.kind in ("sym", "text") for token in bare)
    return euler or (letters and all(map(_in_name, bare)))


def _without_indices(found: Tokens) -> list[Token]:
    inside, bare = depths(found), []
    at = 0
    while at < len(found):
        if found[at][:2] == ("op", "_") and bare:
            level, at = inside[at], at + 2
            while at < len(found) and inside[at] > level:  # the rest of its group
                at += 1
            at += at < len(found) and found[at].text == "}" and inside[at - 1] > level
        else:
            bare.append(found[at])
            at += 1
    return bare


def _in_name(token: Token) -> bool:
    kind, text, _ = token
    return (
        kind in ("sym", "const", "text")
        or (kind == "fn" and text in _TRIGONOMETRIC)
        or (kind == "cmd" and text == "frac")
        or (kind == "op" and text in "+-/(){}|'")
    )


def thousands(found: Tokens) -> list[Token]:
    """1,234 as one number: commas without a space before three digits, where no list is meant.

    In brackets, as in (1,234), a comma parts two entries, unless others there have spaces after
    them.
    """
    made: list[Token] = []
    at = 0
    while at < len(found):
        end = at
        while (
            found[end].kind == "num"
            and end + 2 < len(found)
            and found[end + 1][:2] == ("op", ",")
            and found[end + 2].kind == "num"
            and not found[end + 2].spaced
        ):
            end += 2
        run = [token.text for token in found[at : end + 1 : 2]]
        if len(run) > 1 and _grouped(run) and not _in_list(found, at, end):
            made.append(Token("num", "".join(run), found[at].spaced))
        else:
            made += found[at : end + 1]
        at = end + 1
    return made


def _grouped(run: list[str]) -> bool:
    first, *rest = run
    return (
        len(first) <= 3 and first.isdigit() and first[0] != "0"
        and all(len(group) == 3 and group.isdigit() for group in rest[:-1])
        and len(rest[-1].partition(".")[0]) == 3 and "e" not in rest[-1].lower()
    )  # fmt: skip


def _in_list(found: Tokens, start: int, end: int) -> bool:
    """Whether a list's brackets are around it, with no other comma in them."""
    inside = depths(found)
    level = inside[start]
    first = start
    while first >= 0 and inside[first] >= level:
        first -= 1
    if first < 0 or found[first].text not in _LISTS:
        return False
    last = end
    while last < len(found) and inside[last] >= level:
        last += 1
    around = [*range(first, start), *range(end, last)]
    return not any(found[at].text in ",;" and inside[at] == level for at in around)


def _shape(token: Token) -> str:
    return {"text": "t", "num": "n"}.get(token.kind, token.text)


def unit_apart(found: Tokens) -> tuple[Tokens, str, Fraction]:
    """(the value's tokens, its unit, a factor such as a million).

    Raises:
        Unread: words that are no unit.
    """
    signed = found[1:] if found and found[0].text in ("-", "+") else found
    if signed and signed[0].text in _MONEY and signed[0].kind == "op":
        rest, _, factor = unit_apart([*found[: len(found) - len(signed)], *signed[1:]])
        return rest, signed[0].text, factor
    if found and found[-1].kind == "op" and found[-1].text in _MONEY:
        return found[:-1], found[-1].text, Fraction(1)
    if len(found) > 2 and found[-2].text == "°" and found[-1].text in ("C", "F"):
        return found[:-2], f"degree{found[-1].text}", Fraction(1)
    at = next((i for i, token in enumerate(found) if token.kind == "text"), 0)
    if not at:
        return found, "", Fraction(1)
    while found[at - 1].text in ("^", "{") and at > 1:  # 3^{\text{rd}}
        at -= 1
    shown, tail = found[:at], found[at:]
    if not re.fullmatch(r"(?:t|[/*]t|\^-?n|\^\{(?:-?n|t)\})+", "".join(map(_shape, tail))):
        raise Unread
    text = "".join(t.text if t.kind != "text" else f" {t.text}" for t in tail).strip()
    if text.strip("^{ }") in _ORDINALS:
        return shown, "", Fraction(1)
    first, _, others = text.partition(" ")
    factor = Fraction(units.MULTIPLES.get(first, 1))
    text = others if factor != 1 else text
    if text.casefold() in units.PERCENT:
        return shown, "percent", factor
    unit = units.unit(text) if text else ""
    if unit is None:
        raise Unread
    return shown, unit, factor
