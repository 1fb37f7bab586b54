"""From a body to a prompt's tokens and its limit of new ones."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.eval.serve.bodies import Body, ChatBody, TextBody
from kvpolicies.eval.serve.errors import ApiError
from kvpolicies.models.form import RAW, Form
from kvpolicies.models.prompts import Prompts, user


@dataclass(frozen=True)
class Lengths:
    """What a request may ask for, in tokens."""

    max_length: int
    """Prompt and answer."""
    max_new: int
    """Answer; also what a request gets that names no limit."""

    def limit(self, prompt: int, asked: int | None) -> int:
        """Most new tokens of a prompt of so many.

        Raises:
            ApiError: 400 if the prompt or what is asked for is too long.
        """
        room = self.max_length - prompt
        if room < 1:
            raise self._too_long(f"the prompt has {prompt} tokens, and an answer needs one more")
        if asked is None:
            return min(self.max_new, room)
        if asked > self.max_new:
            raise ApiError(400, f"max_tokens: at most {self.max_new} here, got {asked}",
                           "max_tokens")  # fmt: skip
        if asked > room:
            raise self._too_long(f"{prompt} tokens of the prompt and {asked} new ones were asked")
        return asked

    def _too_long(self, what: str) -> ApiError:
        text = f"at most {self.max_length} tokens of prompt and answer: {what}"
        return ApiError(400, text, "messages", "context_length_exceeded")


class Encoder:
    """The tokenizer, in a thread of its own: a long prompt does not hold up other clients.

    Args:
        words: token ids of the model; a prompt given as tokens must lie below.
        form: how conversations are rendered; a prompt that is text is rendered already.
    """

    def __init__(self, tokenizer: Any, words: int, form: Form):
        self.tokenizer, self.words = tokenizer, words
        self.chats, self.texts = Prompts(tokenizer, form), Prompts(tokenizer, RAW)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def prompt(self, body: Body) -> list[int]:
        """The body's tokens.

        Raises:
            ApiError: 400 for what the chat template refuses, tokens that are none, or no tokens.
        """
        if isinstance(body, ChatBody):
            tokens, field = self._chat(body), "messages"
        else:
            assert isinstance(body, TextBody)
            given, field = body.one_prompt(), "prompt"
            tokens = self.texts.prompt(user(given)) if isinstance(given, str) else given
        if not tokens:
            raise ApiError(400, f"{field}: has no tokens; a prompt needs at least one", field)
        if min(tokens) < 0 or max(tokens) >= self.words:
            raise ApiError(400, f"{field}: token ids go from 0 to {self.words - 1}", field)
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of new tokens, special tokens left out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _chat(self, body: ChatBody) -> list[int]:
        try:
            return self.chats.prompt([message.plain() for message in body.messages])
        except UserError as error:
            raise ApiError(400, f"messages: {error}", "messages") from None
