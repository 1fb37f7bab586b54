"""The engine that sympy is: exact where values are rational, else to hundreds of digits.

Two expressions with symbols are equal if they are at a score of points, real, rational and whole,
wherever both are defined: sqrt(1/n) is 1/sqrt(n), sqrt(x^2) is not x. An equal value at one point
means: the difference is zero exactly, or vanishes to a precision that grows with the numbers in it.
"""

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import sympy
from sympy import S

from kvpolicies.eval.tasks.maths.answers import Answer, Joined, Known, Many, Quantity, Span
from kvpolicies.eval.tasks.maths.arithmetic import Arithmetic, Undecided
from kvpolicies.eval.tasks.maths.trees import Tree, Unread, decimal, parts, stands_for

Value = Any  # what sympy makes; its types say little

_FUNCTIONS: dict[str, Any] = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec,
    "csc": sympy.csc, "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan,
    "sinh": sympy.sinh, "cosh": sympy.cosh, "tanh": sympy.tanh, "exp": sympy.exp,
    "abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling, "factorial": sympy.factorial,
    "binom": sympy.binomial, "max": sympy.Max, "min": sympy.Min, "gcd": sympy.gcd,
    "lcm": sympy.lcm, "det": sympy.det,
}  # fmt: skip
_CONSTANTS = {"pi": S.Pi, "e": S.Exp1, "i": S.ImaginaryUnit, "oo": S.Infinity}
_SETS = {
    "R": S.Reals, "Z": S.Integers, "N": S.Naturals, "Q": S.Rationals, "C": S.Complexes,
    "empty": S.EmptySet,
}  # fmt: skip
_INFINITE: Tree = ("const", "oo")
_MOST_DIGITS = 100_000  # of a power
_LARGEST = 20_000  # argument of a factorial
_ENOUGH = 4  # points at which both are defined
_NO_VALUE = (S.NaN, S.ComplexInfinity)


class Algebra:
    """An Engine."""

    def __init__(self) -> None:
        self._plain = Arithmetic()

    def same(self, one: Tree, other: Tree) -> bool:
        """Whether two expressions have one value wherever both have one."""
        try:
            return self._plain.same(one, other)
        except Undecided:
            left, right = _Built(one), _Built(other)
            return _equal(left.value, right.value, [*left.domain, *right.domain])

    def proportional(self, one: Tree, other: Tree, *, positive: bool) -> bool:
        """Whether they differ by a factor that is a number, not zero."""
        left, right = _Built(one), _Built(other)
        if not (left.value.free_symbols and right.value.free_symbols):
            return False
        for point in _points(left.value.free_symbols | right.value.free_symbols):
            ours, theirs = left.value.xreplace(point), right.value.xreplace(point)
            ratio: Value = S.NaN if _is_zero(ours) or _is_zero(theirs) else ours / theirs
            if not ratio.is_real:
                continue
            if positive and not ratio.evalf() > 0:
                return False
            domain = [*left.domain, *right.domain]
            return _equal(left.value * theirs, right.value * ours, domain)
        return False

    def rounds_to(self, shown: Tree, exact: Tree) -> bool:
        """Whether `exact` may be written as the decimal `shown`."""
        written, value = decimal(shown), _Built(exact).value
        if written is None or isinstance(value, sympy.MatrixBase) or not value.is_real:
            return False
        if value.free_symbols:
            return False
        close: Value = sympy.Rational(str(value.evalf(len(str(written.value)) + 40)))
        return stands_for(written, Fraction(int(close.p), int(close.q)))

    def same_sets(self, one: Answer, other: Answer) -> bool:
        """Whether two sets of real numbers have the same members."""
        left, right = _set(one), _set(other)
        if left == right:
            return True
        ours, theirs = _runs(left), _runs(right)
        return (
            ours is not None
            and theirs is not None
            and len(ours) == len(theirs)
            and all(
                a[2:] == b[2:] and _equal(a[0], b[0]) and _equal(a[1], b[1])
                for a, b in zip(ours, theirs, strict=True)
            )
        )

    def ordered(self, low: Tree, high: Tree) -> bool:
        """Whether low < high for certain."""
        difference = _Built(high).value - _Built(low).value
        return bool(difference.is_real and not difference.free_symbols and difference.evalf() > 0)


class _Built:
    """A tree as sympy's expression, and what must not be negative for it to be real."""

    def __init__(self, tree: Tree) -> None:
        if _INFINITE in parts(tree) and tree not in (_INFINITE, ("neg", _INFINITE)):
            raise Unread  # no arithmetic with it
        self.domain: list[Value] = []
        self.value = self._made(tree)

    def _made(self, tree: Tree) -> Value:
        kind, *rest = tree
        if kind == "num":
            return sympy.Rational(rest[0].numerator, rest[0].denominator)
        if kind == "dec":
            return sympy.Rational(rest[0])
        if kind == "sym":
            return sympy.Symbol(rest[0], real=True)
        if kind == "const":
            return _CONSTANTS[rest[0]]
        if kind == "matrix":
            return sympy.ImmutableMatrix([[self._made(cell) for cell in row] for row in rest[0]])
        if kind in ("fn", "call"):
            return self._function(kind, rest[0], [self._made(part) for part in rest[1:]])
        return self._arithmetic(kind, [self._made(part) for part in rest])

    def _arithmetic(self, kind: str, values: list[Value]) -> Value:
        first, second = values[0], values[-1]
        if kind in ("add", "mixed"):
            return first + second
        if kind == "neg":
            return -first
        if kind == "mul":
            return first * second
        if kind == "div":
            return first / second
        if kind == "deg":
            return first * S.Pi / 180
        if kind == "pct":
            return first / 100
        if kind == "root":
            return self._root(first, second)
        if kind != "pow":
            raise Unread
        return self._power(first, second)

    def _power(self, base: Value, exponent: Value) -> Value:
        if isinstance(base, sympy.MatrixBase) and exponent == sympy.Symbol("T", real=True):
            return base.T
        if isinstance(exponent, sympy.Rational) and isinstance(base, sympy.Rational):
            if base.is_zero and exponent <= 0:
                raise Unread
            if abs(exponent) * _digits(base) > _MOST_DIGITS:
                raise Unread
        if isinstance(exponent, sympy.Rational) and not exponent.is_integer:
            self.domain.append(base)
        return base**exponent

    def _root(self, index: Value, value: Value) -> Value:
        if index.is_odd and index > 1 and value.is_real:
            return sympy.sign(value) * sympy.Abs(value) ** (1 / index)
        self.domain.append(value)
        return value ** (1 / index)

    def _function(self, kind: str, name: str, values: list[Value]) -> Value:
        if kind == "call":  # of an unknown function only its arguments are known
            return sympy.Symbol(f"{name}({', '.join(map(str, map(sympy.expand, values)))})")
        if name in ("ln", "log"):
            self.domain.append(values[0])
            return sympy.log(*values)
        if name in ("factorial", "binom") and any(v.is_Rational and v > _LARGEST for v in values):
            raise Unread
        return _FUNCTIONS[name](*values)


def _equal(one: Value, other: Value, domain: list[Value] | None = None) -> bool:
    """Equal wherever both are defined."""
    if isinstance(one, sympy.MatrixBase) or isinstance(other, sympy.MatrixBase):
        return _equal_matrices(one, other, domain)
    if one.has(*_NO_VALUE) or other.has(*_NO_VALUE):
        return False
    if one == other:
        return True
    if one.has(S.Infinity, S.NegativeInfinity) or other.has(S.Infinity, S.NegativeInfinity):
        return False
    symbols = one.free_symbols | other.free_symbols
    if not symbols:
        return _is_zero(one - other, one, other)
    complex_ = one.has(S.ImaginaryUnit) or other.has(S.ImaginaryUnit)
    agreed = 0
    for point in _points(symbols):
        if not complex_ and not all(_not_negative(d.xreplace(point)) for d in domain or ()):
            continue
        ours, theirs = one.xreplace(point), other.xreplace(point)
        if ours.has(*_NO_VALUE, S.Infinity) or theirs.has(*_NO_VALUE, S.Infinity):
            continue
        if not _is_zero(ours - theirs, ours, theirs):
            return False
        agreed += 1
    return agreed >= _ENOUGH


def _equal_matrices(one: Value, other: Value, domain: list[Value] | None) -> bool:
    if not (isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase)):
        return False
    pairs = zip(one.flat(), other.flat(), strict=False)
    return one.shape == other.shape and all(_equal(a, b, domain) for a, b in pairs)


def _is_zero(difference: Any, *terms: Value) -> bool:
    """Whether a number is zero, measured by what it is the difference of."""
    if difference.is_Rational:
        return difference == 0
    digits = 60 + 4 * max(map(_digits, difference.atoms(sympy.Rational)), default=0)
    value = abs(difference.evalf(15, maxn=3 * digits))
    scale = max((abs(term.evalf(15, maxn=3 * digits)) for term in terms), default=S.One)
    return bool(value <= max(scale, value) * sympy.Float(10) ** -digits)


def _digits(number: Value) -> int:
    """About how many a fraction is written with."""
    return (int(number.p).bit_length() + int(number.q).bit_length()) // 3 + 1


def _not_negative(value: Value) -> bool:
    close = value.evalf(15)
    return bool(close.is_real and close >= 0)


def _points(symbols: Value) -> Iterator[dict[Value, Value]]:
    """A score: fractions above 0, between -1 and 1, of any sign; whole numbers."""
    draw = random.Random(0)
    named = sorted(symbols, key=str)
    for low, high, least in ((1, 500, 97), (-96, 96, 97), (-500, 500, 89), (1, 12, 1), (-9, 9, 1)):
        for _ in range(4):
            yield {s: sympy.Rational(draw.randint(low, high), least) for s in named}


def _set(answer: Answer) -> Value:
    if isinstance(answer, Known):
        return _SETS[answer.name]
    if isinstance(answer, Span):
        low, high = (_Built(end).value for end in (answer.low, answer.high))
        return sympy.Interval(low, high, answer.open_low, answer.open_high)
    if isinstance(answer, Joined):
        left, right = _set(answer.left), _set(answer.right)
        return {"∪": sympy.Union, "∩": sympy.Intersection, "∖": sympy.Complement}[answer.sign](
            left, right
        )
    assert isinstance(answer, Many)
    if not all(isinstance(item, Quantity) for item in answer.items):
        raise Unread
    values = [_Built(item.tree).value for item in answer.items]  # type: ignore[union-attr]
    return sympy.Interval.open(*values) if answer.kind == "tuple" else sympy.FiniteSet(*values)


def _runs(made: Value) -> list[tuple[Value, Value, bool, bool]] | None:
    """A set's intervals and points in order, as (low, high, open, open); None for other sets."""
    found = []
    for part in made.args if isinstance(made, sympy.Union) else (made,):
        if isinstance(part, sympy.Interval):
            found.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
        elif isinstance(part, sympy.FiniteSet):
            found += [(point, point, False, False) for point in part]
        else:
            return None
    return sorted(found, key=lambda run: run[0].evalf())
