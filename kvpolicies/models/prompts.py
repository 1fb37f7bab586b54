"""From what is asked to the tokens that a model sees: the one place where prompts are rendered.

Studies, `generate`, `serve`, `train` and `revisit` ask through it, so that a study's prompt is the
deployment's, token for token.

    prompts = Prompts(tokenizer, Form())
    ids = prompts.prompt(user("Is 91 prime?"))

A prompt is sent as it is written: by the tokenizer's chat template where there is one, else bare,
with the tokens that the tokenizer itself adds. Nothing else stands around it, but the `wrapper` of
a config that names one. Whoever writes a prompt writes text: what reads like a control token in it
is encoded as text, unless the config says otherwise.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.models import tokens
from kvpolicies.models.form import SLOT, Form
from kvpolicies.models.plain import PlainText

Message = dict[str, Any]
"""A turn: role (system, user, assistant), content, perhaps reasoning_content."""

_SWITCHES = ("enable_thinking", "thinking")
"""Names under which chat templates take whether to think."""


def user(text: str) -> list[Message]:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]


class Prompts:
    """Renders prompts in one form for one tokenizer.

    Args:
        form: a `Form`, or a config that is one.

    Raises:
        UserError: a chat template, or its switch for thinking, is asked for and not there.
    """

    form: Form
    """In effect: `auto` is settled, and so is the template's own way of thinking."""

    def __init__(self, tokenizer: Any, form: Form):
        self.tokenizer = tokenizer
        self._template = _template_of(tokenizer)
        if form.template == "chat" and not self._template:
            raise UserError("template chat: the model's tokenizer has no chat template")
        kind = "chat" if self._template and form.template != "plain" else "plain"
        thinking = self._thinking(kind, form.thinking)
        self.form = Form(kind, form.wrapper, thinking, form.special_tokens)

    @property
    def fingerprint(self) -> str:
        """A short hash of the chat template; empty where none is used."""
        if self.form.template == "plain":
            return ""
        return hashlib.sha256(self._template.encode()).hexdigest()[:16]

    @property
    def dated(self) -> bool:
        """Whether the chat template writes the date of the day."""
        return self.form.template == "chat" and "strftime_now" in self._template

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the answer begins.

        Raises:
            UserError: the chat template refuses it.
        """
        return self._encoded(messages, answer=True)

    def document(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation with its last answer, ended as the model ends it.

        Without a chat template: those of the prompt, then the answer's, as if it had been written.

        Raises:
            UserError: the chat template refuses it.
        """
        if self.form.template == "chat":
            spelt = "reasoning_content" in self._template
            turns = messages if spelt else [_spelt_out(message) for message in messages]
            return self._encoded(turns, answer=False)
        asked, last = messages, messages[-1]
        answer: list[int] = []
        if last["role"] == "assistant":
            asked, answer = messages[:-1], self.answer(_spelt_out(last)["content"])
        return self.ended([*self.prompt(asked), *answer])

    def answer(self, text: str) -> list[int]:
        """The tokens of an answer, as they follow a prompt's."""
        if self.form.special_tokens:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self._plain.encode(self._plain.hide(text, True), add_special_tokens=False)

    def ended(self, ids: list[int]) -> list[int]:
        """`ids` with the token that ends a text behind them, unless there are none."""
        end = self.tokenizer.eos_token_id
        return ids if not ids or end is None or ids[-1] == end else [*ids, end]

    def text(
        self, messages: Sequence[Message], *, answer: bool = True, goes_on: bool = False
    ) -> str:
        """The conversation as text, up to where the answer begins.

        Args:
            answer: False ends it with the last turn.
            goes_on: that turn is not closed then, and can be written on.

        Raises:
            UserError: the chat template refuses it.
        """
        wrapped = [self._wrapped(message) for message in messages]
        if self.form.template == "plain":
            return "\n".join(message["content"] for message in wrapped)
        return self._filled(wrapped, answer, self.form.thinking, goes_on and not answer)

    def _encoded(self, messages: Sequence[Message], answer: bool) -> list[int]:
        """Token ids of what `text` gives, control tokens of contents as text."""
        plain = self.form.template == "plain"
        if self.form.special_tokens:
            return self.tokenizer.encode(
                self.text(messages, answer=answer), add_special_tokens=plain
            )
        hidden = [self._hidden(message) for message in messages]
        return self._plain.encode(self.text(hidden, answer=answer), add_special_tokens=plain)

    def _hidden(self, message: Message) -> Message:
        """The message with the control tokens of its texts out of sight."""
        own = message["role"] == "assistant"
        return {
            key: self._plain.hide(value, own) if isinstance(value, str) and key != "role" else value
            for key, value in message.items()
        }

    @cached_property
    def _plain(self) -> PlainText:
        return PlainText(self.tokenizer, tokens.control(self.tokenizer, self._template))

    def _wrapped(self, message: Message) -> Message:
        if not self.form.wrapper or message["role"] != "user":
            return message
        before, after = self.form.wrapper.split(SLOT)
        return {**message, "content": before + message["content"] + after}

    def _filled(
        self,
        messages: Sequence[Message],
        answer: bool,
        thinking: bool | None,
        goes_on: bool = False,
    ) -> str:
        """The chat template's text."""
        switches = {} if thinking is None else dict.fromkeys(_SWITCHES, thinking)
        switches |= {"continue_final_message": True} if goes_on else {}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer, **switches
            )
        except Exception as error:  # templates are programs, and raise what they like
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(f"the model's chat template refuses this: {first[:200]}") from error

    def _thinking(self, kind: str, asked: bool | None) -> bool | None:
        """Whether the template thinks: as asked, or by itself; None where that cannot be told."""
        try:
            on, off, own = (
                self._filled(user("1"), True, thinking) if kind == "chat" else ""
                for thinking in (True, False, None)
            )
        except UserError:
            on = off = own = ""
        if on == off and asked is not None:
            whose = "the model's" if kind == "chat" else "only a"
            has = "has no" if kind == "chat" else "has a"
            raise UserError(
                f"thinking {str(asked).lower()}: {whose} chat template {has} switch for it"
            )
        known = {} if on == off else {on: True, off: False}
        return known.get(own) if asked is None else asked


def _template_of(tokenizer: Any) -> str:
    """The chat template, or nothing."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("default")
    return found or ""


def _spelt_out(message: Message) -> Message:
    """Reasoning written out, where a template would leave it out."""
    reasoning = message.get("reasoning_content")
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    if reasoning:
        rest["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
    return rest
