"""From an answer's text to what it says, or None if not all of it can be read for certain."""

import functools
import re

from kvpolicies.eval.tasks.maths import expressions, pieces, units
from kvpolicies.eval.tasks.maths.answers import (
    Answer,
    Joined,
    Known,
    Many,
    Named,
    Quantity,
    Ratio,
    Relation,
    Sets,
    Span,
    Word,
)
from kvpolicies.eval.tasks.maths.gathering import REALS, alone, gathered, spread
from kvpolicies.eval.tasks.maths.pieces import Tokens, bracketed, split
from kvpolicies.eval.tasks.maths.tokens import LONGEST, Token, plain, tokens
from kvpolicies.eval.tasks.maths.trees import Tree, Unread, parts, signs

_EQUAL, _ORDER = ("=", "≈"), ("<", "≤", ">", "≥", "≠")
_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
_INFINITY: Tree = ("const", "oo")
_PHRASES: dict[str, Answer] = {
    "all real numbers": REALS, "all reals": REALS, "real numbers": REALS,
    "no solution": Known("empty"), "no solutions": Known("empty"), "empty set": Known("empty"),
    "the empty set": Known("empty"), "dne": Word("does not exist"),
}  # fmt: skip
_SHORT_WORDS = frozenset(("yes", "no", "odd", "dne"))
_INTRODUCTION = re.compile(
    r"approximately|about|exactly|(?:answer|the (?!.*\b(?:not|least|most|than)\b).+ is):?"
)


@functools.lru_cache(maxsize=1 << 12)
def read(source: str) -> Answer | None:
    """What `source` says."""
    if len(source) > LONGEST:
        return None
    try:
        text = plain(source)
        return word(text) if _is_phrase(text) else _listed(pieces.thousands(tokens(source)))
    except (Unread, RecursionError):
        return None


def word(text: str) -> Answer:
    """Text, compared without case, layout and outer brackets."""
    lowered = re.sub(r"\s+", " ", text.casefold()).strip(" .,;:!")
    bare = re.sub(r"^\((.*)\)$", r"\1", lowered).strip()
    return _PHRASES.get(bare) or Word(bare)


def _is_phrase(text: str) -> bool:
    if not re.fullmatch(r"[A-Za-z][A-Za-z'., ()-]*", text):
        return False
    words = re.findall("[A-Za-z]+", text)
    return text.lower() in _SHORT_WORDS or any(
        len(w) >= 4 and Token("sym", w[0]) == tokens(w)[0] for w in words
    )


def _listed(found: Tokens) -> Answer:
    """One statement, or several between commas."""
    marks, said = split(found, (",", ";", "and", "or"))
    filled = [s for at, s in enumerate(said) if s or (marks[at : at + 1] or [","])[0] in ",;"]
    if len(filled) == 1:
        return alone(_statement(filled[0]))
    joint = "or" if "or" in marks else "and" if "and" in marks else ""
    return gathered(spread([_statement(part) for part in filled]), joint)


def _statement(found: Tokens) -> Answer:
    """A value, or an equation, an inequality, a membership."""
    if found and found[0].kind == "text" and _INTRODUCTION.fullmatch(found[0].text.casefold()):
        found = found[1:]
    if found and found[0][:2] == ("op", "≈"):
        found = found[1:]
    marks, sides = split(found, (*_EQUAL, *_ORDER, "∈"))
    if not marks:
        return value(found)
    if marks == ["∈"] and pieces.is_symbol(sides[0]):
        return Named(_name(sides[0]), value(sides[1]))
    if all(mark in _EQUAL for mark in marks):
        return _equation(sides, marks)
    if all(mark in _ORDER for mark in marks):
        return _inequality(sides, marks)
    raise Unread


def _equation(sides: list[Tokens], marks: list[str]) -> Answer:
    if len(sides) == 2 and not pieces.is_name(sides[0]) and pieces.is_name(sides[1]):
        sides = sides[::-1]
    exact = [sides[0]] + [s for s, mark in zip(sides[1:], marks, strict=True) if mark == "="]
    near = tuple(value(s) for s, mark in zip(sides[1:], marks, strict=True) if mark == "≈")
    name = ""
    if pieces.is_name(sides[0]):
        name, exact = _name(sides[0]), exact[1:]
        if not exact:  # x ≈ 3.14
            return Named(name, near[0], near=near[1:])
    while len(exact) > 1 and pieces.is_name(exact[0]):  # x = y = 3
        exact = exact[1:]
    relation = _difference(sides, "=") if marks == ["="] else None
    if len(exact) == 2 and not name and relation and _symbols(relation.tree):
        return relation
    values = [value(side) for side in exact]
    shared = name and isinstance(values[-1], Quantity) and name in _symbols(values[-1].tree)
    if shared and relation:  # x = 2x + 3 gives no value
        return relation
    return Named(name, values[-1], relation, tuple(values[:-1]), near)


def _inequality(sides: list[Tokens], marks: list[str]) -> Answer:
    if len(sides) == 3 and pieces.is_symbol(sides[1]) and "≠" not in marks:
        if marks[0] in "≥>":
            sides, marks = sides[::-1], [_FLIPPED[mark] for mark in marks[::-1]]
        if not all(mark in "<≤" for mark in marks):
            raise Unread
        low, high = (_tree(sides[at]) for at in (0, 2))
        return Named(_name(sides[1]), Span(low, high, marks[0] == "<", marks[1] == "<"))
    if len(sides) != 2:
        raise Unread
    relation = _difference(sides, marks[0])
    if not pieces.is_symbol(sides[0]):
        sides, marks = sides[::-1], [_FLIPPED[marks[0]]]
    if not pieces.is_symbol(sides[0]) or pieces.is_symbol(sides[1]):
        if relation is None:
            raise Unread
        return relation
    name, end = _name(sides[0]), _tree(sides[1])
    if name in _symbols(end) and relation:
        return relation
    return Named(name, _beyond(end, marks[0]), relation)


def _beyond(end: Tree, mark: str) -> Answer:
    if mark == "≠":
        return Joined("∖", REALS, Many("set", (Quantity(end),)))
    if mark in "<≤":
        return Span(("neg", _INFINITY), end, True, mark == "<")
    return Span(end, _INFINITY, mark == ">", True)


def _difference(sides: list[Tokens], mark: str) -> Relation | None:
    """left - right against zero; None where a side is only a name, as in ∠A = 30°."""
    try:
        left, right = (_tree(side) for side in sides)
    except Unread:
        return None
    if mark in (">", "≥"):
        left, right, mark = right, left, _FLIPPED[mark]
    return Relation(mark, ("add", left, ("neg", right)))


def value(found: Tokens) -> Answer:
    """A quantity, a word, a set, a tuple, an interval or a ratio."""
    if not found:
        raise Unread
    signs_of_sets = ("∪", "∩", "∖", "-") if found[0].kind == "set" else ("∪", "∩", "∖")
    marks, sides = split(found, signs_of_sets)
    if marks:
        left = list(found[: len(found) - len(sides[-1]) - 1])
        return Joined(marks[-1].replace("-", "∖"), value(left), value(sides[-1]))
    if len(found) == 1 and found[0].kind == "set":
        return Known(found[0].text)
    if bracketed(found):
        return _bracket(found[0].text, found[1:-1], found[-1].text)
    if all(token.kind == "text" for token in found):
        return _text(" ".join(token.text for token in found))
    colons, terms = split(found, (":",))
    if colons:
        return Ratio(tuple(_tree(term) for term in terms))
    return _quantity(found)


def _bracket(opening: str, inner: Tokens, closing: str) -> Answer:
    if opening == r"\{" and closing == r"\}":
        return _set(inner)
    marks, sides = split(inner, (",", ";"))
    ends = opening + closing
    if not marks:
        if ends not in ("()", "[]"):
            raise Unread
        return value(inner)
    if len(sides) == 2 and (ends in ("[)", "(]", "[]")):
        low, high = map(_tree, sides)
        return Span(low, high, opening == "(", closing == ")")
    if ends not in ("()", "[]", "⟨⟩"):
        raise Unread
    items = tuple(value(side) for side in sides)
    if any(isinstance(i, Quantity) and len(signs(i.tree)) > 1 for i in items):
        raise Unread
    return Many("tuple" if ends != "⟨⟩" else "vector", items)


def _set(inner: Tokens) -> Answer:
    if not inner:
        return Known("empty")
    marks, sides = split(inner, ("mid", "|", ":"))
    if len(marks) == 1:  # those of which something is said
        condition = _listed(sides[1])
        if isinstance(condition, Named) and isinstance(condition.value, Sets):
            name = split(sides[0], ("∈",))[1]
            within = len(name) == 1 or name[1] == [Token("set", "R")]
            if within and _name(name[0]) == condition.name:
                return condition.value
        raise Unread
    _, items = split(inner, (",", ";"))
    return Many("set", tuple(spread([_statement(item) for item in items])))


def _text(text: str) -> Answer:
    r"""\text{12 cm} is what 12 cm is."""
    if not re.search(r"\d|,|\b(?:and|or)\b", text):
        return word(text)
    inner = read(text)
    return word(text) if inner is None else inner


def _quantity(found: Tokens) -> Answer:
    shown, unit, factor = pieces.unit_apart(found)
    tree = expressions.read(shown)
    if factor != 1:
        tree = ("mul", tree, ("num", factor))
    if tree[0] == "deg" and not unit:
        tree, unit = tree[1], "degree"
    if unit in units.PERCENT:
        tree, unit = ("pct", tree), ""
    alone = all(_is_letter(token) or token.text in "()" for token in shown)
    letters = "".join(t.text[-1] for t in shown if t.text not in "()") if alone else ""
    return Quantity(tree, unit, letters)


def _is_letter(token: Token) -> bool:
    return token.kind in ("sym", "const") and len(token.text.removeprefix("bold ")) == 1


def _tree(found: Tokens) -> Tree:
    """An expression, its unit aside."""
    made = _quantity(found)
    assert isinstance(made, Quantity)
    return ("deg", made.tree) if made.unit == "degree" else made.tree


def _name(found: Tokens) -> str:
    if not found:
        raise Unread
    return " ".join(token.text for token in found)


def _symbols(tree: Tree) -> set[str]:
    return {part[1] for part in parts(tree) if part[0] in ("sym", "const")}
