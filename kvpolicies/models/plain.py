"""Text to token ids where control tokens that somebody writes in a text stay text.

Only what a chat template writes is a control token. A tokenizer cannot tell: it looks for their
spelling anywhere, before it cuts words. So a text's own control tokens lose a character while the
template is filled (`hide`); what then still reads like one was written by the template. A copy of
the tokenizer, which knows control tokens by other names, encodes the whole at once (`encode`): the
template's by these names, everything else as the text that it is. Nothing is cut into pieces, so
words merge, and prefixes are added, exactly as by the tokenizer itself.
"""

import json
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from kvpolicies.errors import UserError

_DIGIT = 0xF0000
"""The first of 16 private characters, which no text of a model's vocabulary holds."""


def _private(digits: str) -> str:
    """Hexadecimal digits in private characters."""
    return "".join(chr(_DIGIT + int(digit, 16)) for digit in digits)


class PlainText:
    """Encodes text for one tokenizer.

    Args:
        tokenizer: of transformers. One that is not of its fast kind takes only texts that hold no
            control tokens.
        control: texts of its control tokens, each with whether it is marked as special.
    """

    def __init__(self, tokenizer: Any, control: Mapping[str, bool]):
        self.tokenizer, self.control = tokenizer, control
        # Nobody can write what is made up now, and so no text turns into something else.
        self._mark, name = (_private(secrets.token_hex(16)) for _ in range(2))
        self._names = {text: name + _private(f"{i:06x}") for i, text in enumerate(control)}
        self._hidden = re.compile(f"{self._mark}([{chr(_DIGIT)}-{chr(_DIGIT + 15)}]{{6}})")
        self._begins = {text[:n] for text in control for n in range(1, len(text))}
        self._ends = {text[n:] for text in control for n in range(1, len(text))}
        self._longest = max(map(len, control), default=0)

    def hide(self, text: str, answer: bool = False) -> str:
        """`text` for the inside of a template, its control tokens out of sight.

        Args:
            answer: it is a model's own, in which tokens without the mark of special ones, such as
                the ends of its thinking, are meant, and looked for by templates.
        """
        for name, special in self.control.items():
            if name in text and (special or not answer):
                text = text.replace(name, self._masked(name[0]) + name[1:])
        return self._loose(text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, or of a filled template, in which texts were hidden.

        Raises:
            UserError: a hidden control token, and a tokenizer that cannot do without it.
        """
        if self._renamed is None:
            return self._as_it_is(text, add_special_tokens)
        for name, other in self._names.items():
            text = text.replace(name, other)
        # A batch, also of one, is encoded without holding other threads up.
        (made,) = self._renamed.encode_batch_fast(
            [self._shown(text)], add_special_tokens=add_special_tokens
        )
        return made.ids

    def _as_it_is(self, text: str, add_special_tokens: bool) -> list[int]:
        shown = self._shown(text)
        for name in self.control:
            if shown.count(name) != text.count(name):
                raise UserError(
                    f"{name!r} stands in a text, and this tokenizer reads it as a control token "
                    "there; with special_tokens: true that is meant"
                )
        return self.tokenizer.encode(shown, add_special_tokens=add_special_tokens)

    def _masked(self, sign: str) -> str:
        return self._mark + _private(f"{ord(sign):06x}")

    def _shown(self, text: str) -> str:
        def shown(match: re.Match[str]) -> str:
            return chr(int("".join(f"{ord(digit) - _DIGIT:x}" for digit in match[1]), 16))

        return self._hidden.sub(shown, text)

    def _loose(self, text: str) -> str:
        """`text` where its ends are no part of a control token either, which a template could
        complete; without the white space around, which a template may strip."""
        bare = text.strip()
        sizes = range(1, min(len(bare), self._longest - 1) + 1)
        first = any(bare[:n] in self._ends for n in sizes) or (
            bool(bare) and len(bare) < self._longest and any(bare in c for c in self.control)
        )
        last = any(bare[-n:] in self._begins for n in sizes)
        at, end = len(text) - len(text.lstrip()), len(text.rstrip()) - 1
        if last and not (first and at == end):
            text = text[:end] + self._masked(text[end]) + text[end + 1 :]
        return text[:at] + self._masked(text[at]) + text[at + 1 :] if first else text

    @cached_property
    def _renamed(self) -> Any:
        """The tokenizer with other names for its control tokens; None where it cannot be copied."""
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        from tokenizers import Tokenizer

        inner = self.tokenizer.backend_tokenizer
        try:
            made = Tokenizer.from_str(json.dumps(_renamed(json.loads(inner.to_str()), self._names)))
        except Exception:  # a part in Python has no JSON; the library raises no kind of its own
            return None
        made.no_truncation()
        made.no_padding()
        same = all(made.token_to_id(b) == inner.token_to_id(a) for a, b in self._names.items())
        return made if same else None


def _renamed(state: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer's JSON with other names for some tokens."""
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # characters must not merge into a control token either
        model["merges"] = [
            (a, b) for a, b in model["merges"] if not (a in names or b in names or a + b in names)
        ]
    return state
