r"""From tokens to the tree of one expression; all of them, or `Unread`.

What readers of mathematics would read in two ways is read in none: 1/2x, 3 4, \sin x/2.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from kvpolicies.eval.maths.cursor import Cursor
from kvpolicies.eval.maths.tokens import Token
from kvpolicies.eval.maths.trees import Tree, Unread, in_base, signed

_DEEPEST = 60
_CLOSING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_MATRICES = ("pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "smallmatrix", "array")
_CALLED = frozenset("fgh")  # a letter that is a function where brackets follow


def read(tokens: Sequence[Token]) -> Tree:
    """The tree of all of `tokens`.

    Raises:
        Unread: something is left over, missing, unknown, or can be read in two ways.
    """
    reader = _Reader(tokens)
    tree = reader.sum()
    if reader.here.kind != "stop":
        raise Unread
    return tree


class _Reader(Cursor):
    """Recursive descent: a method a level of precedence, from sums down to atoms."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        super().__init__(tokens)
        self.depth, self.bars = 0, 0

    def sum(self) -> Tree:
        """Terms between plus and minus."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unread
        tree = self.term()
        while sign := self.take("+", "-", "±", "∓"):
            tree = ("add", tree, signed(sign, self.term()))
        self.depth -= 1
        return tree

    def term(self) -> Tree:
        """Factors, with signs between them or none."""
        tree = self.unary()
        while True:
            if sign := self.take("*", "/"):
                right = self.unary()
                if sign == "/" and self.starts_factor():  # 1/2x
                    raise Unread
                tree = ("mul" if sign == "*" else "div", tree, right)
            elif self.starts_factor():
                apart = self.ahead(-1)[:2] in (("op", "}"), ("op", "!"))  # 2^{3}5^{2}, 3!4!
                if (self.here.kind == "num" and not apart) or tree[0] == "mixed":  # 3 4, x2, 1 1/2x
                    raise Unread
                tree = ("mul", tree, self.power())
            else:
                return tree

    def unary(self) -> Tree:
        """A factor with its signs."""
        if sign := self.take("+", "-", "±", "∓"):
            return signed(sign, self.unary())
        return self.power()

    def starts_factor(self) -> bool:
        """Whether the next token begins a factor that no sign of multiplication precedes."""
        kind, text, _ = self.here
        if kind == "op":
            return text in ("(", "[", "{", "⌊", "⌈") or (text == "|" and not self.bars)
        if kind == "cmd":
            return text in ("frac", "sqrt", "binom")
        return kind in ("num", "sym", "const", "fn", "begin")

    def power(self) -> Tree:
        """An atom with what is written after or above it."""
        start = self.at
        tree = self.atom()
        raised = False
        while True:
            if self.take("^"):
                if raised or self.tokens[start].kind == "fn":  # 2^3^2, sin(x)^2
                    raise Unread
                tree, raised = ("pow", tree, self.exponent()), True
            elif mark := self.take("!", "%", "°"):
                if mark == "!" and (raised or tree[:2] == ("fn", "factorial")):  # 2^3!, 3!!
                    raise Unread
                kinds = {"!": ("fn", "factorial"), "%": ("pct",), "°": ("deg",)}
                tree = (*kinds[mark], tree)
            else:
                return tree

    def exponent(self) -> Tree:
        """What stands after a caret: a group, a number, or one atom, perhaps negative."""
        if self.sees("{", "("):
            return self.group()
        if self.take("-"):
            return ("neg", self.exponent())
        if self.here.kind not in ("num", "sym", "const", "cmd"):
            raise Unread
        return self.small()

    def small(self) -> Tree:
        """One literal or atom."""
        return self.plain_number() if self.here.kind == "num" else self.atom()

    def group(self) -> Tree:
        """An expression in brackets."""
        opening = self.take(*_CLOSING)
        if not opening:
            raise Unread
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.expect(_CLOSING[opening])
        self.bars = bars
        if opening in "⌊⌈":
            return ("fn", "floor" if opening == "⌊" else "ceil", tree)
        return tree

    def atom(self) -> Tree:
        """A number, a symbol, a function's value, or a group."""
        kind, text, _ = self.here
        if kind == "num":
            return self.numeral()
        if kind == "op":
            return self.absolute() if text == "|" else self.group()
        self.at += 1
        if kind in ("sym", "const"):
            return self.symbol(kind, text)
        if kind == "fn":
            return self.function(_ALIASES.get(text, text))
        if kind == "begin" and text in _MATRICES:
            return self.matrix(text)
        if kind == "cmd" and text in ("frac", "binom"):
            return self.fraction(text)
        if kind == "cmd" and text == "sqrt":
            return self.root()
        raise Unread

    def numeral(self) -> Tree:
        r"""A literal with its base, 52_8, or as a mixed number, 1\frac12 or 1 4/5."""
        tree = self.plain_number()
        if tree[0] != "num" or tree[1].denominator != 1:
            return tree
        if self.take("_"):
            return in_base(tree[1], self.braced(self.plain_number))
        start = self.at
        if self.here[:2] == ("cmd", "frac"):
            self.at += 1
            part = self.fraction("frac")
        elif self.here.kind == "num" and self.here.spaced:
            top = self.plain_number()
            self.expect("/")
            part = ("div", top, self.plain_number())
        else:
            return tree
        if part[1][0] != "num" or part[2][0] != "num":  # 2\frac{\pi}{3} is a product
            self.at = start
            return tree
        if not 0 < part[1][1] < part[2][1]:
            raise Unread
        return ("mixed", tree, part)

    def braced(self, inner: Any) -> Tree:
        """`inner`, in braces or brackets or not."""
        closing = _CLOSING.get(self.take("{", "("))
        tree = inner()
        if closing:
            self.expect(closing)
        return tree

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
