"""From tokens to text as they come: whole characters, in the end the very text of all tokens."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""
PATIENCE = 64
"""Tokens without a stable end, after which the text is taken as it is: bytes, but no characters."""


class Detokenizer:
    """Text of a growing list of tokens.

    A token alone has no text: a character may take several, and a space may belong to the one
    before. So a new token is decoded together with those of the last piece of text, and what that
    adds is new. All pieces together are `decode(all tokens)`.

    Args:
        decode: the tokenizer's, special tokens left out.
    """

    def __init__(self, decode: Decode):
        self.decode = decode
        self.tokens: list[int] = []
        self.sent = ""
        self._start = self._read = 0

    def feed(self, token: int) -> str:
        """The new text; empty where a character is not complete."""
        self.tokens.append(token)
        before = self.decode(self.tokens[self._start : self._read])
        now = self.decode(self.tokens[self._start :])
        patient = len(self.tokens) - self._read < PATIENCE
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and patient):
            return ""
        self._start, self._read = self._read, len(self.tokens)
        return self._sent(now[len(before) :])

    def rest(self) -> str:
        """What is left when no token follows."""
        whole = self.decode(self.tokens)
        return self._sent(whole[len(self.sent) :])

    def _sent(self, text: str) -> str:
        self.sent += text
        return text


class Writer:
    """Text up to the first stop string, which may lie across tokens.

    What could be the beginning of a stop string is held back until it is known.

    Args:
        decode: the tokenizer's, special tokens left out.
        stops: none of them empty.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self.detokenizer, self.stops = Detokenizer(decode), stops
        self.stopped = False
        self._held = ""

    def feed(self, token: int) -> str:
        """The new text that can no longer be part of a stop string; "" once stopped."""
        return "" if self.stopped else self._passed(self.detokenizer.feed(token))

    def rest(self) -> str:
        """What is left when no token follows."""
        if self.stopped:
            return ""
        text = self._passed(self.detokenizer.rest())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _passed(self, new: str) -> str:
        text = self._held + new
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_begun(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
