"""Asks an ASGI application without a socket, and reads what it answers."""

import asyncio
import json
from typing import Any


class Answer:
    """A whole answer."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        """What the body says."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a refusal."""
        return self.json["error"]


async def ask(
    app: Any, method: str, path: str, body: Any = b"", headers: dict[str, str] | None = None
) -> Answer:
    """One request by a client that stays; `body` is bytes, or sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"host": "localhost", **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in given.items() if v],
    }  # fmt: skip
    return await _answered(app, scope, data)


async def _answered(app: Any, scope: dict[str, Any], data: bytes) -> Answer:
    coming = [{"type": "http.request", "body": data, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not coming:
            await asyncio.Event().wait()  # it never hangs up
        return coming.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start = sent[0]
    headers = {k.decode().lower(): v.decode("latin-1") for k, v in start["headers"]}
    return Answer(start["status"], headers, b"".join(m.get("body", b"") for m in sent[1:]))
