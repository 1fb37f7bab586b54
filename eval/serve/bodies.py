"""Bodies of requests: what is understood, what may be ignored, and what is refused by name.

A field that would change the answer and is not supported is an error, not silently dropped.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpolicies.errors import UserError, nearest
from kvpolicies.eval.serve.errors import ApiError
from kvpolicies.sampling import Sampling

STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
STOPS, STOP_LENGTH = 4, 256

# Change nothing in the answer.
IGNORED = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
# Accepted where they ask for nothing special.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}

Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]


class Part(BaseModel):
    """A piece of a message; only text is."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def plain(self) -> dict[str, str]:
        """As a chat template takes it; the parts of a content are lines."""
        for key, value in (self.model_extra or {}).items():
            if value not in (None, [], ""):  # what a client sends back of our own messages
                raise ApiError(400, f"messages: {key!r} is not supported", "messages")
        text = self.content
        if not isinstance(text, str):
            text = "\n".join(part.text for part in text)
        # `developer` is what newer clients call `system`; templates know the latter.
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """What a stream tells beside text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(BaseModel):
    """What both endpoints share."""

    model_config = STRICT
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def limit(self) -> int | None:
        """Most new tokens, where the body says so."""
        return self.max_tokens

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
        base = {"temperature": default.temperature, "top_p": default.top_p, "top_k": default.top_k}
        try:
            return Sampling(**{**base, "seed": seed, **said})
        except UserError as error:
            raise ApiError(400, str(error)) from None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        """Most new tokens, by either name."""
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them",
                           "max_completion_tokens")  # fmt: skip
        return next(iter(given), None)


class TextBody(Body):
    """POST /v1/completions: text, or tokens."""

    prompt: str | list[str] | list[int] | list[list[int]]

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
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refused(error) from None
    _check_others(parsed.model_extra or {}, list(kind.model_fields))
    if parsed.stream_options and not parsed.stream:
        raise ApiError(400, "stream_options: only with stream: true", "stream_options")
    return parsed


def _refused(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    places = [str(x) for x in first["loc"] if isinstance(x, int) or str(x).isidentifier()]
    where = ".".join(places)
    message = f"{where}: {first['msg']}" if where else first["msg"]
    return ApiError(400, message, places[0] if places else None)


def _check_others(others: Mapping[str, Any], known: list[str]) -> None:
    for key, value in others.items():
        if key in IGNORED or value is None:
            continue
        if key not in NEUTRAL:
            names = [*known, *IGNORED, *NEUTRAL]
            raise ApiError(400, f"unknown field {key[:64]!r}: {nearest(key[:64], names)}", key[:64])
        if not any(type(value) is type(v) and value == v for v in NEUTRAL[key]):
            only = " or ".join(repr(v) for v in NEUTRAL[key])
            raise ApiError(400, f"{key}: not supported here but for {only}", key)
