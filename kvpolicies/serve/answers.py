"""Completions as OpenAI's clients read them: one JSON object, or a stream of events."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from kvpolicies.models.text import Writer
from kvpolicies.serve.errors import ApiError
from kvpolicies.serve.service import Service, Ticket


@dataclass(frozen=True)
class Piece:
    """Some text of an answer; the last one has a `finish`."""

    text: str
    tokens: int
    """New tokens so far."""
    finish: str | None = None


class Cancelled(Exception):
    """The request was taken back; nobody waits for its answer."""


async def pieces(service: Service, ticket: Ticket, writer: Writer) -> AsyncIterator[Piece]:
    """The answer as it comes; the row is given back wherever this ends."""
    tokens = 0
    try:
        async for event in ticket:
            text = ""
            for token in event.tokens:
                tokens += 1
                text += writer.feed(token)
                if writer.stopped:
                    break
            if event.finish == "cancelled":
                raise Cancelled
            if event.finish and not writer.stopped:
                text += writer.rest()
            finish = "stop" if writer.stopped else event.finish
            if text or finish:
                yield Piece(text, tokens, finish)
            if finish:
                return
    finally:
        service.cancel(ticket, "stop" if writer.stopped else "cancelled")


@dataclass(frozen=True)
class Reply:
    """How an endpoint words its answer."""

    model: str
    chat: bool
    prompt_tokens: int
    usage: bool = False
    """A stream ends with the usage."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, last: Piece) -> dict[str, Any]:
        """The answer that is not streamed."""
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [self._choice(said, last.finish)],
                "usage": self._usage(last.tokens)}  # fmt: skip

    async def stream(self, first: Piece, others: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        """Server-sent events; an error becomes the last one, for the status has been sent."""
        if self.chat:
            yield self._chunk({"role": "assistant", "content": ""}, None)
        last = first
        try:
            yield self._piece(first)
            async for last in others:
                yield self._piece(last)
        except ApiError as error:
            yield _event(error.body())
            return
        except Cancelled:
            return
        if self.usage:
            yield _event({**self._head(self._kind), "choices": [],
                          "usage": self._usage(last.tokens)})  # fmt: skip
        yield b"data: [DONE]\n\n"

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self.id}" if self.chat else f"cmpl-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def _piece(self, piece: Piece) -> bytes:
        if not self.chat:
            return self._chunk(piece.text, piece.finish)
        said = self._chunk({"content": piece.text}, None) if piece.text else b""
        return said + (self._chunk({}, piece.finish) if piece.finish else b"")

    def _chunk(self, said: Any, finish: str | None) -> bytes:
        choice = self._choice({"delta" if self.chat else "text": said}, finish)
        usage = {"usage": None} if self.usage else {}
        return _event({**self._head(self._kind), "choices": [choice], **usage})

    def _choice(self, said: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": finish}

    def _usage(self, new: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
