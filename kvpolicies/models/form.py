"""How prompts are rendered, as a config says it. `prompts.py` does it."""

from dataclasses import dataclass, fields

from kvpolicies.errors import UserError
from kvpolicies.options import check_options, option

TEMPLATES = ("auto", "chat", "plain")
SLOT = "{prompt}"
"""Where a wrapper takes in the prompt."""


@dataclass(frozen=True)
class Form:
    """How prompts are rendered. Configs of what asks a model inherit these fields.

    Raises:
        UserError: a value that an option cannot have; a wrapper without its place for the prompt.
    """

    template: str = option(
        "auto", "how prompts are rendered: chat, by the tokenizer's chat template; plain, as they "
        "are; auto, chat where there is one", choices=TEMPLATES)  # fmt: skip
    wrapper: str = option("", f"text around each user's turn, with {SLOT} in it; default: none")
    thinking: bool | None = option(
        None, "switches a chat template's thinking on or off; default: the template's own"
    )
    special_tokens: bool = option(
        False, "read special tokens that are written in a prompt as such, not as plain text"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.wrapper and self.wrapper.count(SLOT) != 1:
            raise UserError(
                f"wrapper must hold {SLOT} once, as in 'Question: {SLOT}', got "
                f"{self.wrapper[:200]!r}"
            )

    def described(self) -> str:
        """In words, of a form in effect (`Prompts.form`)."""
        said = "by the chat template" if self.template == "chat" else "without a chat template"
        if self.thinking is not None:
            said += f", thinking {'on' if self.thinking else 'off'}"
        said += f", in the wrapper {self.wrapper!r}" if self.wrapper else ", as they are written"
        return said + (", special tokens read as such" if self.special_tokens else "")


KEYS = tuple(field.name for field in fields(Form))
AUTO = Form()
"""Of a config that says nothing."""
RAW = Form("plain", special_tokens=True)
"""Of text that its writer has rendered: special tokens in it are meant."""
