"""Whether two answers say one thing. What takes algebra is asked of an engine.

Exact values are equal or not: no rounding is ever forgiven between them. A number with a decimal
point also stands for what it is a rounding of, if it shows six digits or more.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from kvpolicies.eval.tasks.maths.answers import (
    Answer,
    Many,
    Named,
    Quantity,
    Ratio,
    Relation,
    Sets,
    Span,
    Word,
)
from kvpolicies.eval.tasks.maths.trees import Tree, decimal, parts, rational
from kvpolicies.eval.tasks.maths.units import compatible

_MOST = 40  # entries of a list whose order is not given
_HALF_TURN: Tree = ("div", ("const", "pi"), ("num", Fraction(180)))


class SymbolicEngine(Protocol):
    """What an algebra system decides."""

    def same(self, one: Tree, other: Tree) -> bool:
        """Whether two expressions have one value wherever both have one."""
        ...

    def proportional(self, one: Tree, other: Tree, *, positive: bool) -> bool:
        """Whether they differ by a factor that is a number, not zero."""
        ...

    def rounds_to(self, shown: Tree, exact: Tree) -> bool:
        """Whether `exact` may be written as the decimal `shown`."""
        ...

    def same_sets(self, one: Answer, other: Answer) -> bool:
        """Whether two sets of real numbers have the same members."""
        ...

    def ordered(self, low: Tree, high: Tree) -> bool:
        """Whether low < high for certain."""
        ...


def same(wanted: Answer, given: Answer, engine: SymbolicEngine) -> bool:
    """Whether `given` is right where `wanted` is."""
    return _Comparison(engine).answers(wanted, given)


class _Comparison:
    def __init__(self, engine: SymbolicEngine) -> None:
        self.engine = engine

    def answers(self, wanted: Answer, given: Answer) -> bool:
        """Whether they say one thing."""
        if isinstance(wanted, Named) and isinstance(given, Named) and wanted.name and given.name:
            return self.named(wanted, given)
        if isinstance(wanted, Relation) or isinstance(given, Relation):
            return self.relations(wanted, given)
        if not (self.consistent(wanted) and self.consistent(given)):
            return False
        if isinstance(wanted, Named) or isinstance(given, Named):
            for one, other in ((wanted, given), (given, wanted)):
                each = isinstance(other, Many) and other.kind == "named"
                if each and isinstance(one, Named) and one.name[:1] not in ("", "("):
                    return False  # x = 1, 2 is not x = 1, y = 2
            wanted = wanted.value if isinstance(wanted, Named) else wanted
            given = given.value if isinstance(given, Named) else given
            return self.answers(wanted, given)
        if isinstance(wanted, Word) or isinstance(given, Word):
            return _spelled(wanted) == _spelled(given) != ""
        if isinstance(wanted, Sets) or isinstance(given, Sets):
            return self.sets(wanted, given)
        if isinstance(wanted, Many) or isinstance(given, Many):
            return self.several(wanted, given)
        if isinstance(wanted, Ratio) or isinstance(given, Ratio):
            return self.ratios(wanted, given)
        assert isinstance(wanted, Quantity) and isinstance(given, Quantity)
        if len(wanted.letters) > 2 and len(given.letters) > 2:  # ACB is no product
            return wanted.letters == given.letters
        return self.quantities(wanted, given)

    def consistent(self, answer: Answer) -> bool:
        """Whether an answer of several equal sides has equal sides."""
        if not isinstance(answer, Named):
            return True
        return all(self.answers(answer.value, side) for side in answer.equal) and all(
            self.about(answer.value, side) for side in answer.near
        )

    def about(self, exact: Answer, near: Answer) -> bool:
        """Whether a number is within a hundredth of another."""
        if not (isinstance(exact, Quantity) and isinstance(near, Quantity)):
            return False
        shown = rational(near.tree)
        if shown is None:
            return False
        low, high = sorted((shown * Fraction(99, 100), shown * Fraction(101, 100)))
        least, most = (("num", bound) for bound in (low, high))
        return self.engine.ordered(least, exact.tree) and self.engine.ordered(exact.tree, most)

    def named(self, wanted: Named, given: Named) -> bool:
        """Values of one name, or one equation."""
        if wanted.name == given.name:
            return (
                self.consistent(wanted)
                and self.consistent(given)
                and self.answers(wanted.value, given.value)
            )
        return self.relations(wanted, given)

    def relations(self, wanted: Answer, given: Answer) -> bool:
        """Equations or inequalities that differ by a factor."""
        one, other = (a.relation if isinstance(a, Named) else a for a in (wanted, given))
        if not (isinstance(one, Relation) and isinstance(other, Relation)):
            return False
        if one.sign != other.sign:
            return False
        return self.engine.proportional(one.tree, other.tree, positive=one.sign in "<≤")

    def sets(self, wanted: Answer, given: Answer) -> bool:
        """Sets of real numbers; (1, 2) is one where the other is."""
        if isinstance(wanted, Span) and isinstance(given, Span):
            return (
                (wanted.open_low, wanted.open_high) == (given.open_low, given.open_high)
                and self.engine.same(wanted.low, given.low)
                and self.engine.same(wanted.high, given.high)
            )
        if wanted == given:
            return True
        if not all(_is_set(answer) for answer in (wanted, given)):
            return False
        return self.engine.same_sets(wanted, given)

    def several(self, wanted: Answer, given: Answer) -> bool:
        """Lists, sets and tuples."""
        if isinstance(wanted, Quantity) or isinstance(given, Quantity):
            return self.one_of_many(wanted, given)
        if not (isinstance(wanted, Many) and isinstance(given, Many)):
            return False
        if len(wanted.items) != len(given.items):
            return self.deduplicated(wanted, given)
        kinds = {wanted.kind, given.kind}
        if kinds <= {"list", "set"} or kinds == {"named"}:
            return self.unordered(wanted.items, given.items)
        if kinds <= {"list", "set", "named"} and _indexed(wanted) | _indexed(given):
            return self.unordered(wanted.items, given.items)
        if "set" in kinds:
            return False
        if "list" in kinds and "tuple" in kinds and self.may_be_interval(wanted, given):
            return False
        return all(map(self.answers, wanted.items, given.items))

    def one_of_many(self, wanted: Answer, given: Answer) -> bool:
        """A value and a set of one; a column and a vector."""
        many, one = (wanted, given) if isinstance(wanted, Many) else (given, wanted)
        assert isinstance(many, Many)
        if not isinstance(one, Quantity):
            return False
        if one.tree[0] == "matrix" and many.kind in ("tuple", "vector"):
            rows = one.tree[1]
            if len(rows) != len(many.items) or len(rows[0]) != 1:
                return False
            cells = [Quantity(row[0]) for row in rows]
            return all(map(self.answers, cells, many.items))
        return many.kind == "set" and len(many.items) == 1 and self.answers(one, many.items[0])

    def may_be_interval(self, wanted: Many, given: Many) -> bool:
        """Whether (1, 2) may not be meant as a list."""
        pair = wanted if wanted.kind == "tuple" else given
        if len(pair.items) != 2:
            return False
        low, high = pair.items
        if not (isinstance(low, Quantity) and isinstance(high, Quantity)):
            return False
        return not self.engine.ordered(high.tree, low.tree)

    def deduplicated(self, wanted: Many, given: Many) -> bool:
        """{1, 1, 2} is {1, 2}."""
        if {wanted.kind, given.kind} != {"set"}:
            return False
        one, other = (
            tuple(e for at, e in enumerate(many.items)
                  if not any(self.answers(e, before) for before in many.items[:at]))
            for many in (wanted, given)
        )  # fmt: skip
        return len(one) == len(other) and self.unordered(one, other)

    def unordered(self, wanted: Sequence[Answer], given: Sequence[Answer]) -> bool:
        """Whether both have equal entries in any order."""
        if len(wanted) > _MOST:
            return all(map(self.answers, wanted, given))
        left = list(given)
        for one in wanted:
            found = next((at for at, other in enumerate(left) if self.answers(one, other)), None)
            if found is None:
                return False
            del left[found]
        return not left

    def ratios(self, wanted: Answer, given: Answer) -> bool:
        """2 : 3 is 4 : 6, and the number 2/3."""
        terms = [
            a.terms if isinstance(a, Ratio) else (a.tree, ("num", Fraction(1)))
            for a in (wanted, given)
            if isinstance(a, Ratio | Quantity)
        ]
        if len(terms) != 2 or len(terms[0]) != len(terms[1]):
            return False
        (first, *ours), (begin, *theirs) = terms
        return all(
            self.engine.same(("div", first, one), ("div", begin, other))
            for one, other in zip(ours, theirs, strict=True)
        )

    def quantities(self, wanted: Quantity, given: Quantity) -> bool:
        """Values, and units where both have one."""
        if not compatible(wanted.unit, given.unit):
            return False
        one, other = wanted.tree, given.tree
        if self.values(one, other):
            return True
        # 50% is 0.5, and 50 where percent are asked for.
        if (one[0] == "pct") != (other[0] == "pct") and not (wanted.unit or given.unit):
            return self.values(*(t[1] if t[0] == "pct" else t for t in (one, other)))
        if {wanted.unit, given.unit} == {"", "degree"}:
            turned = [("mul", q.tree, _HALF_TURN) if q.unit else q.tree for q in (wanted, given)]
            return any(_has_pi(q.tree) for q in (wanted, given)) and self.values(*turned)
        return False

    def values(self, one: Tree, other: Tree) -> bool:
        """Equal, or one a rounding of the other."""
        if one == other or self.engine.same(one, other):
            return True
        rounded = [decimal(tree) for tree in (one, other)]
        if all(rounded) or not any(rounded):
            return False
        shown, exact = (one, other) if rounded[0] else (other, one)
        return self.engine.rounds_to(shown, exact)


def _indexed(many: Many) -> bool:
    """Whether it says x_1 = 2, x_2 = 3: where no names are asked for, an order of no meaning."""
    names = [item.name.partition(" _ ") for item in many.items if isinstance(item, Named)]
    return many.kind == "named" and all(mark for _, mark, _ in names) and len(
        {letter for letter, _, _ in names}
    ) == 1  # fmt: skip


def _is_set(answer: Answer) -> bool:
    pair = isinstance(answer, Many) and answer.kind == "tuple" and len(answer.items) == 2
    return isinstance(answer, Sets) or pair or (isinstance(answer, Many) and answer.kind == "set")


def _spelled(answer: Answer) -> str:
    if isinstance(answer, Quantity):
        return answer.letters.casefold()
    return answer.text if isinstance(answer, Word) else ""


def _has_pi(tree: Tree) -> bool:
    return any(part == ("const", "pi") for part in parts(tree))
