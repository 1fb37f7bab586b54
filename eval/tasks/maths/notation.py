r"""What letters and commands stand for: x_1, f(x), \sin x, \frac, \sqrt, matrices."""

from abc import ABC, abstractmethod
from fractions import Fraction

from kvpolicies.eval.tasks.maths.cursor import Cursor
from kvpolicies.eval.tasks.maths.trees import Tree, Unread

_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_MATRICES = ("pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "smallmatrix", "array")
_CALLED = frozenset("fgh")  # a letter that is a function where brackets follow


class Notation(Cursor, ABC):
    """Reads these; arithmetic around and inside of them is the subclass's (expressions.py)."""

    bars = 0
    """How many absolute values are open here."""

    @abstractmethod
    def sum(self) -> Tree:
        """Terms between plus and minus."""

    @abstractmethod
    def power(self) -> Tree:
        """An atom with what is written after or above it."""

    @abstractmethod
    def exponent(self) -> Tree:
        """What stands after a caret."""

    @abstractmethod
    def group(self) -> Tree:
        """An expression in brackets."""

    @abstractmethod
    def small(self) -> Tree:
        """One literal or atom."""

    @abstractmethod
    def starts_factor(self) -> bool:
        """Whether the next token begins a factor that no sign of multiplication precedes."""

    def symbol(self, kind: str, text: str) -> Tree:
        """A letter with index and primes; f(x)."""
        if self.take("_"):
            kind, text = "sym", f"{text}_{self.index()}"
        while self.take("'"):
            kind, text = "sym", text + "'"
        if text.rstrip("'") in _CALLED and self.here[:2] == ("op", "("):
            return ("call", text, *self.arguments())
        return (kind, text)

    def arguments(self) -> list[Tree]:
        """Expressions in round brackets or braces, between commas."""
        closing = {"(": ")", r"\{": r"\}"}.get(self.take("(", r"\{"))
        if not closing:
            raise Unread
        found = [self.sum()]
        while self.take(","):
            found.append(self.sum())
        self.expect(closing)
        return found

    def function(self, name: str) -> Tree:
        """A function's value, its argument in brackets or the product that follows."""
        name = _ALIASES.get(name, name)
        if name in ("max", "min", "gcd", "lcm"):
            return ("fn", name, *self.arguments())
        base: list[Tree] = []
        if name == "log":
            base = [("num", Fraction(10))]
            if self.take("_"):
                base = [self.group() if self.sees("{", "(") else self.small()]
        power: Tree | None = None
        if self.take("^"):
            power = self.exponent()
        if power == ("neg", ("num", Fraction(1))):
            if name not in _INVERSE:
                raise Unread
            name, power = _INVERSE[name], None
        tree = ("fn", name, self.argument(), *base)
        return tree if power is None else ("pow", tree, power)

    def argument(self) -> Tree:
        """A function's argument: a group, or factors up to the next function."""
        if self.sees("(", "[", "{"):
            return self.group()
        if not self.starts_factor():
            raise Unread
        tree = self.power()
        while self.starts_factor() and self.here.kind not in ("fn", "num"):
            if self.sees("(", "["):  # \sin x(y+1)
                raise Unread
            tree = ("mul", tree, self.power())
        if self.sees("/") and self.ahead(1).kind != "fn":  # \sin x/2
            raise Unread
        return tree

    def absolute(self) -> Tree:
        """An expression between bars."""
        self.expect("|")
        self.bars += 1
        tree = self.sum()
        self.expect("|")
        self.bars -= 1
        return ("fn", "abs", tree)

    def root(self) -> Tree:
        """A root, perhaps with its index."""
        index: Tree = ("num", Fraction(2))
        if self.take("["):
            index = self.sum()
            self.expect("]")
        return ("root", index, self.group() if self.sees("{", "(") else self.small())

    def fraction(self, command: str) -> Tree:
        r"""The two arguments of \frac or \binom; without braces one digit or letter is one."""
        if command not in ("frac", "binom"):
            raise Unread
        kind, text, _ = self.here
        if kind == "num" and len(text) == 2 and text.isdigit():  # \frac12
            self.at += 1
            top, bottom = (("num", Fraction(digit)) for digit in text)
        else:
            top, bottom = self.operand(), self.operand()
        if _leading(top) == _leading(bottom) == ("sym", "d"):  # a derivative
            raise Unread
        return ("div", top, bottom) if command == "frac" else ("fn", command, top, bottom)

    def operand(self) -> Tree:
        """A group, or one digit or letter."""
        if self.sees("{"):
            return self.group()
        kind, text, _ = self.here
        if kind not in ("num", "sym", "const") or (kind == "num" and len(text) > 1):
            raise Unread
        self.at += 1
        return ("num", Fraction(text)) if kind == "num" else (kind, text)

    def matrix(self, name: str) -> Tree:
        """Rows of cells, up to the end of the environment; vmatrix is a determinant."""
        if name not in _MATRICES:
            raise Unread
        if name == "array":
            self.index()  # the columns
        rows: list[tuple[Tree, ...]] = []
        while self.here[:2] != ("end", name):
            cells = [self.sum()]
            while self.take("&"):
                cells.append(self.sum())
            rows.append(tuple(cells))
            if not self.take("newline") and self.here[:2] != ("end", name):
                raise Unread
        self.at += 1
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unread
        tree = ("matrix", tuple(rows))
        return ("fn", "det", tree) if name == "vmatrix" else tree


def _leading(tree: Tree) -> Tree:
    """The first factor of a product."""
    return _leading(tree[1]) if tree[0] in ("mul", "pow") else tree
