"""What an answer says: a quantity, a word, a list, a tuple, an interval, an equation, ...

Classes only; reading.py makes them, equality.py compares them. Values are trees (trees.py).
"""

from dataclasses import dataclass, field

from kvpolicies.eval.tasks.maths.trees import Tree


@dataclass(frozen=True)
class Quantity:
    """A value with its unit."""

    tree: Tree
    unit: str = ""
    letters: str = field(default="", compare=False)
    """What it spells, if it is written in letters alone."""


@dataclass(frozen=True)
class Word:
    """Text."""

    text: str


@dataclass(frozen=True)
class Many:
    """Several answers in no order ("list", "set") or in one ("tuple"), or one a name ("named")."""

    kind: str
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Span:
    """An interval; an infinite end is open."""

    low: Tree
    high: Tree
    open_low: bool
    open_high: bool


@dataclass(frozen=True)
class Joined:
    """Two sets under ∪, ∩ or ∖."""

    sign: str
    left: "Answer"
    right: "Answer"


@dataclass(frozen=True)
class Known:
    """A set with a name: R, Z, N, Q, C or empty."""

    name: str


@dataclass(frozen=True)
class Ratio:
    """a : b : c"""

    terms: tuple[Tree, ...]


@dataclass(frozen=True)
class Relation:
    """`tree` = 0, < 0, ≤ 0 or ≠ 0."""

    sign: str
    tree: Tree


@dataclass(frozen=True)
class Named:
    """A value that is said to be `name`'s: x = 3, x < 3, f(x) = 2x; "" if it is nobody's."""

    name: str
    value: "Answer"
    relation: Relation | None = None
    """The same as one statement, where it is one."""
    equal: tuple["Answer", ...] = ()
    """What it says to be the same: of x = 2 + 3 = 5 the sum."""
    near: tuple["Answer", ...] = ()
    """What it says to be about the same."""


Answer = Quantity | Word | Many | Span | Joined | Known | Ratio | Relation | Named
Sets = (Span, Joined, Known)
