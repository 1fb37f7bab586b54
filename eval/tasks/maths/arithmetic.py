"""The engine of whole numbers and fractions alone, which decides most answers there are."""

from fractions import Fraction

from kvpolicies.eval.tasks.maths.answers import Answer
from kvpolicies.eval.tasks.maths.trees import Tree, decimal, rational, stands_for


class Undecided(Exception):
    """It takes algebra."""


class Arithmetic:
    """An Engine (equality.py) whose methods raise Undecided where fractions are not enough."""

    def same(self, one: Tree, other: Tree) -> bool:
        """Fractions, exactly."""
        if one == other:
            return True
        left, right = _fractions(one, other)
        return left == right

    def ordered(self, low: Tree, high: Tree) -> bool:
        """Fractions, exactly."""
        left, right = _fractions(low, high)
        return left < right

    def rounds_to(self, shown: Tree, exact: Tree) -> bool:
        """A decimal and a fraction."""
        written = decimal(shown)
        assert written
        (value,) = _fractions(exact)
        return not _ends(value) and stands_for(written, value)

    def proportional(self, one: Tree, other: Tree, *, positive: bool) -> bool:
        """Never."""
        raise Undecided

    def same_sets(self, one: Answer, other: Answer) -> bool:
        """Never."""
        raise Undecided


def _fractions(*trees: Tree) -> list[Fraction]:
    found = [value for tree in trees if (value := rational(tree)) is not None]
    if len(found) != len(trees):
        raise Undecided
    return found


def _ends(value: Fraction) -> bool:
    """Whether its decimals come to an end."""
    return (10 ** value.denominator.bit_length()) % value.denominator == 0
