r"""From tokens to the tree of one expression; all of them, or `Unread`.

What readers of mathematics would read in two ways is read in none: 1/2x, 3 4, \sin x/2.
"""

from collections.abc import Sequence
from typing import Any

from kvpolicies.eval.tasks.maths.notation import Notation
from kvpolicies.eval.tasks.maths.tokens import Token
from kvpolicies.eval.tasks.maths.trees import Tree, Unread, in_base, signed

_DEEPEST = 60
_CLOSING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}


def read(tokens: Sequence[Token]) -> Tree:
    """The tree of all of `tokens`.

    Raises:
        Unread: something is left over, missing, unknown, or can be read in two ways.
    """
    reader = _ExpressionReader(tokens)
    tree = reader.whole()
    if reader.here.kind != "stop":
        raise Unread
    return tree


class _ExpressionReader(Notation):
    """Recursive descent: a method a level of precedence, from sums down to atoms."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        super().__init__(tokens)
        self.depth, self.bars = 0, 0

    def whole(self) -> Tree:
        r"""A sum; in plain TeX two, a \over b."""
        tree = self.sum()
        if self.here[:2] in (("cmd", "over"), ("cmd", "choose")):
            kind = ("div",) if self.here.text == "over" else ("fn", "binom")
            self.at += 1
            return (*kind, tree, self.sum())
        return tree

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
        tree = last = self.unary()
        while True:
            if sign := self.take("*", "/"):
                last = self.unary()
                if sign == "/" and self.starts_factor():  # 1/2x
                    raise Unread
                tree = ("mul" if sign == "*" else "div", tree, last)
            elif self.starts_factor():
                if last[0] == "mixed" or (self.here.kind == "num" and not self.apart(last)):
                    raise Unread  # 1 1/2x, 3 4
                last = self.power()
                tree = ("mul", tree, last)
            else:
                return tree

    def apart(self, last: Tree) -> bool:
        """Whether a number after `last` is a factor for certain: 2^{3}5^{2}, 3!4!, n2^n."""
        before = self.ahead(-1)
        raised = last[0] == "pow" and before[:2] == ("op", "}")
        base = self.ahead(1)[:2] == ("op", "^") and before.kind != "num"
        return raised or base or last[:2] == ("fn", "factorial")

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
        tree = self.whole()
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
            return self.function(text)
        if kind == "begin":
            return self.matrix(text)
        if kind == "cmd":
            return self.root() if text == "sqrt" else self.fraction(text)
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
