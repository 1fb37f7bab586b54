"""From a body to a prompt's tokens and its limit of new ones."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.models.form import Form
from kvpolicies.models.prompts import Message, Prompts, user
from kvpolicies.serve.bodies import Body, ChatBody, TextBody
from kvpolicies.serve.errors import ApiError

CHARS_A_TOKEN = 16
"""Of the longest prompt that is tokenised at all. English has 4 to 5, indented code 8."""
SHORT = 1 << 14
"""Characters of a prompt that does not wait for longer ones: about 10 ms of tokenising."""
FRAME = 32
"""Characters that a chat template writes around a turn, roughly."""


@dataclass(frozen=True)
class Lengths:
    """What a request may ask for."""

    max_length: int
    """Tokens of prompt and answer."""
    max_new: int
    """Tokens of an answer; also what a request gets that names no limit."""
    max_chars: int = 0
    """Characters of a prompt; 0: `CHARS_A_TOKEN` for each token of `max_length`."""
    clamp: bool = False
    """A limit that is too high is lowered, and not refused."""

    def check_text(self, chars: int, field: str) -> None:
        """Raises ApiError (400) for a text that is too long to be tokenised."""
        if chars > (most := self.max_chars or CHARS_A_TOKEN * self.max_length):
            raise _too_long(
                f"{field}: at most {most} characters of a prompt are read here (at most "
                f"{self.max_length} tokens of prompt and answer), got {chars}", field
            )  # fmt: skip

    def check_prompt(self, tokens: int, field: str) -> None:
        """Raises ApiError (400) for a prompt that leaves no room for an answer."""
        if tokens >= self.max_length:
            raise _too_long(
                f"{field}: at most {self.max_length} tokens of prompt and answer: the prompt has "
                f"{tokens} tokens, and an answer needs one more", field
            )  # fmt: skip

    def limit(self, prompt: int, asked: int | None, field: str) -> int:
        """Most new tokens of a prompt of so many, where `asked` are wanted by the field's name.

        Raises:
            ApiError: 400 if what is asked for is too much.
        """
        room = self.max_length - prompt
        most = min(self.max_new, room)
        if asked is None or (self.clamp and asked > most):
            return most
        if asked > self.max_new:
            raise ApiError(400, f"{field}: at most {self.max_new} here, got {asked}", field)
        if asked > room:
            raise _too_long(
                f"{field}: at most {self.max_length} tokens of prompt and answer: {prompt} tokens "
                f"of the prompt and {asked} new ones were asked", field
            )  # fmt: skip
        return asked


class Encoder:
    """The tokenizer, beside the clients' thread and the model's.

    Each prompt is bounded by its characters before any work is done for it, and a short one does
    not wait for long ones: those have a thread of their own.

    Args:
        words: token ids of the model; a prompt given as tokens must lie below.
        form: how conversations are rendered, and whether special tokens in a text are read.
    """

    def __init__(self, tokenizer: Any, words: int, lengths: Lengths, form: Form):
        self.tokenizer, self.words, self.lengths = tokenizer, words, lengths
        self._chats = Prompts(tokenizer, form)
        self._texts = Prompts(tokenizer, Form("plain", special_tokens=form.special_tokens))
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer of long prompts")

    async def prompt(self, body: Body) -> list[int]:
        """The body's tokens. Work that has not begun is dropped where this is cancelled.

        Raises:
            ApiError: 400 for what is too long, what the chat template refuses, tokens that are
                none, or no tokens.
        """
        if isinstance(body, ChatBody):
            field, tokens = "messages", await self._chat(body.turns())
        else:
            assert isinstance(body, TextBody)
            field, given = "prompt", body.one_prompt()
            tokens = await self._text(given) if isinstance(given, str) else given
        self.lengths.check_prompt(len(tokens), field)
        if not tokens:
            raise ApiError(400, f"{field}: has no tokens; a prompt needs at least one", field)
        if min(tokens) < 0 or max(tokens) >= self.words:
            raise ApiError(400, f"{field}: token ids go from 0 to {self.words - 1}", field)
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of new tokens, special tokens left out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def close(self) -> None:
        """Drops what waits."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _text(self, text: str) -> list[int]:
        self.lengths.check_text(len(text), "prompt")
        return await self._in_thread(len(text), self._texts, user(text), "prompt")

    async def _chat(self, turns: list[Message]) -> list[int]:
        self.lengths.check_prompt(len(turns), "messages")  # each turn has a token at least
        chars = sum(len(text) for turn in turns for text in turn.values())
        self.lengths.check_text(chars, "messages")
        return await self._in_thread(chars + FRAME * len(turns), self._chats, turns, "messages")

    async def _in_thread(
        self, chars: int, prompts: Prompts, turns: list[Message], field: str
    ) -> list[int]:
        pool = self._short if chars <= SHORT else self._long
        try:
            return await asyncio.wrap_future(pool.submit(prompts.prompt, turns))
        except UserError as error:
            raise ApiError(400, f"{field}: {error}", field) from None


def _too_long(text: str, field: str) -> ApiError:
    return ApiError(400, text, field, "context_length_exceeded")
