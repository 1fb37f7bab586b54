"""Bodies of requests: what is understood, and one line for what is not.

A body is checked in the thread of all clients, so each check ends at the first fault, and no list
is tried as several kinds of list.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from pydantic_core import from_json

from kvpolicies.errors import shown
from kvpolicies.sampling import COLDEST, Sampling
from kvpolicies.serve.errors import ApiError
from kvpolicies.serve.fields import check_others

STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
STOPS, STOP_LENGTH, MESSAGES = 4, 256, 4096


def _kind(expected: str, empty: str = "<texts>") -> Discriminator:
    """Tells text, null and lists of this or that apart before any of them is checked."""

    def kind(value: Any) -> str | None:
        if not isinstance(value, list):
            return {str: "<text>", type(None): "<null>"}.get(type(value))
        return _LISTS.get(type(value[0])) if value else empty

    return Discriminator(
        kind, custom_error_type="kind", custom_error_message=f"expected {expected}"
    )


# No names of fields, so that messages leave them out.
_LISTS = {str: "<texts>", int: "<ids>", list: "<id lists>", dict: "<parts>"}

Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Stops = Annotated[
    Annotated[Stop, Tag("<text>")]
    | Annotated[list[Stop], Field(max_length=STOPS, fail_fast=True), Tag("<texts>")],
    _kind(f"a string, or a list of at most {STOPS} strings"),
]
Ids = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True), Tag("<texts>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[list[Ids], Field(fail_fast=True), Tag("<id lists>")],
    _kind("a string, or a list of token ids"),
]


class Part(BaseModel):
    """A piece of a message; only text is."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True), Tag("<parts>")]
    | Annotated[None, Tag("<null>")],
    _kind('a string, or a list of {"type": "text", "text": ...}', empty="<parts>"),
]


class Message(BaseModel):
    """One message of a conversation."""

    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None
    name: str | None = None
    """Of whoever speaks; chat templates do not show it."""
    reasoning_content: str | None = None
    """What an assistant thought before it answered; some chat templates show it."""
    reasoning: str | None = None
    """The same by its newer name."""

    def plain(self, where: str) -> dict[str, str]:
        """A message in the form that a chat template takes; the parts of a content are lines."""
        for key, value in (self.model_extra or {}).items():
            if value not in (None, [], "", {}):  # what a client sends back of our own messages
                raise ApiError(400, f"{where}.{key[:64]}: not supported", f"{where}.{key[:64]}")
        answer = self.role == "assistant"
        if self.content is None and not answer:
            raise ApiError(400, f"{where}.content: a {self.role} message needs a content",
                           f"{where}.content")  # fmt: skip
        parts = self.content or []
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        # `developer` is what newer clients call `system`; templates know the latter.
        turn = {"role": "system" if self.role == "developer" else self.role, "content": text}
        thought = self.reasoning_content or self.reasoning
        if thought and not answer:
            raise ApiError(400, f"{where}.reasoning_content: only an assistant's message has one",
                           f"{where}.reasoning_content")  # fmt: skip
        return {**turn, "reasoning_content": thought} if thought else turn


class StreamOptions(BaseModel):
    """What a stream tells beside text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def _not_too_cold(value: float) -> float:
    if 0 < value < COLDEST:
        raise ValueError(f"must be 0 (greedy) or at least {COLDEST}")
    return value


class Body(BaseModel):
    """What both endpoints share."""

    model_config = STRICT
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_not_too_cold)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """Most new tokens, where the body says so, and the field's name."""
        return "max_tokens", self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, default: Sampling, seed: int) -> Sampling:
        """How tokens are chosen: what the body says, over `default`; `seed` where it gives none."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        said = {name: value for name, value in given.items() if value is not None}
        if said.get("top_k") == -1:  # as vLLM's clients switch it off
            said["top_k"] = 0
        return replace(default, **{"seed": seed, **said})


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """Most new tokens, by either name."""
        name = "max_completion_tokens"
        if self.max_completion_tokens is None:
            return super().limit
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise ApiError(400, f"max_tokens and {name} differ; give one of them", name)
        return name, self.max_completion_tokens

    def turns(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them.

        Raises:
            ApiError: 400 for a field that asks for more than text.
        """
        return [message.plain(f"messages[{i}]") for i, message in enumerate(self.messages)]


class TextBody(Body):
    """POST /v1/completions: text, or tokens."""

    prompt: Prompt

    def one_prompt(self) -> str | list[int]:
        """The prompt, where a list holds one; several are refused."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return prompt  # type: ignore[return-value]
        if len(prompt) != 1:
            raise ApiError(400, f"prompt: one prompt a request, got {len(prompt)}", "prompt")
        return prompt[0]  # type: ignore[return-value]


Known = TypeVar("Known", bound=Body)


def parse(kind: type[Known], body: bytes) -> Known:
    """The body as `kind`.

    Raises:
        ApiError: 400, in one line that names the field.
    """
    try:
        content = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"Invalid JSON in UTF-8: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(400, f"the body should be an object, got {shown(content)}")
    try:
        parsed = kind.model_validate(content)
    except ValidationError as error:
        raise _refused(error) from None
    check_others(parsed.model_extra or {}, kind.model_fields)
    if parsed.stream_options and not parsed.stream:
        raise ApiError(400, "stream_options: only with stream: true", "stream_options")
    return parsed


def _refused(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    places = [f"[{x}]" if isinstance(x, int) else f".{x}" for x in first["loc"]
              if isinstance(x, int) or x.isidentifier()]  # fmt: skip
    where = "".join(places).removeprefix(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "missing":
        message += f", got {shown(first['input'])}"
    return ApiError(400, f"{where}: {message}" if where else message, where or None)
