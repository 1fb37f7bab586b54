"""A place in a row of tokens."""

from collections.abc import Sequence

from kvpolicies.eval.tasks.maths.tokens import Token
from kvpolicies.eval.tasks.maths.trees import Tree, Unread, literal

_STOP = Token("stop", "")


class Cursor:
    """What comes next, and going past it."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at = tokens, 0

    @property
    def here(self) -> Token:
        """The next token; one of kind "stop" at the end."""
        return self.ahead(0)

    def ahead(self, steps: int) -> Token:
        """The token so many steps on."""
        at = self.at + steps
        return self.tokens[at] if 0 <= at < len(self.tokens) else _STOP

    def sees(self, *signs: str) -> bool:
        """Whether the next token is one of these signs."""
        return self.here.kind == "op" and self.here.text in signs

    def take(self, *signs: str) -> str:
        """The next token's text if it is one of these signs, and on; else ""."""
        if not self.sees(*signs):
            return ""
        self.at += 1
        return self.tokens[self.at - 1].text

    def expect(self, sign: str) -> None:
        """Goes past this sign.

        Raises:
            Unread: something else comes next.
        """
        if not self.take(sign):
            raise Unread

    def plain_number(self) -> Tree:
        """One literal."""
        if self.here.kind != "num":
            raise Unread
        text = self.here.text
        self.at += 1
        value = literal(text)
        return ("dec", text) if "." in text and "(" not in text else ("num", value)

    def index(self) -> str:
        """What stands below a letter, as text."""
        start = self.at
        depth = 0
        while True:
            kind, text, _ = self.here
            self.at += 1
            depth += {"{": 1, "}": -1}.get(text, 0) if kind == "op" else 0
            if kind == "stop" or depth < 0:
                raise Unread
            if depth == 0:
                found = [t.text for t in self.tokens[start : self.at]]
                return " ".join(t for t in found if t not in "{}")
