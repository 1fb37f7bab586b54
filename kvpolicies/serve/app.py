"""The endpoints."""

import asyncio
import secrets
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from kvpolicies.models.text import Writer
from kvpolicies.sampling import Sampling
from kvpolicies.serve.answers import Cancelled, Reply, pieces
from kvpolicies.serve.bodies import Body, ChatBody, TextBody, parse
from kvpolicies.serve.errors import OUTCOMES, ApiError, response
from kvpolicies.serve.guard import Access
from kvpolicies.serve.prompts import Encoder
from kvpolicies.serve.service import Service

BODY_SECONDS = 30
"""A body must have arrived by then."""
T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """What all endpoints know."""

    service: Service
    encoder: Encoder
    access: Access
    model: str
    """The name that requests must give, if any."""
    policy: str
    sampling: Sampling
    """What a request gets that names none; the seed aside."""
    max_body: int
    """Bytes."""

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for the name of another model."""
        if name not in (None, self.model):
            raise ApiError(404, f"model {name!r} is not served here, only {self.model!r}",
                           "model", "model_not_found")  # fmt: skip


def make_app(served: Served) -> FastAPI:
    """The application; its service must be running."""
    app = FastAPI(
        title="kvpolicies", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    served.access.guard(app)
    _add_completions(app, served)
    _add_facts(app, served)

    async def refused(request: Request, error: Any) -> Response:
        return response(error)

    async def unknown(request: Request, error: Any) -> Response:
        # Not request.url: it is made from the Host, which may be no host.
        text = f"{request.method} {request.scope['path']}: {error.detail}"
        return response(ApiError(error.status_code, text, headers=dict(error.headers or {})))

    async def failed(request: Request, error: Exception) -> Response:
        # A fault of ours: the server's log has it, and clients get what they can read.
        return response(ApiError(500, f"{type(error).__name__} in the server", code="failed"))

    for kind, handler in ((ApiError, refused), (HTTPException, unknown), (Exception, failed)):
        app.add_exception_handler(kind, handler)
    return app


def _add_completions(app: FastAPI, served: Served) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(served, request, ChatBody)

    @app.post("/v1/completions")
    async def text(request: Request) -> Response:
        return await _complete(served, request, TextBody)


def _add_facts(app: FastAPI, served: Served) -> None:
    service, readable = served.service, ["GET", "HEAD"]
    entry = {"id": served.model, "object": "model", "created": int(time.time()),
             "owned_by": "kvpolicies"}  # fmt: skip

    @app.api_route("/v1/models", methods=readable)
    async def models() -> Any:
        return {"object": "list", "data": [entry]}

    @app.api_route("/v1/models/{name:path}", methods=readable)
    async def model(name: str) -> Any:
        served.check_model(name)
        return entry

    @app.api_route("/health", methods=readable)
    async def health() -> Response:
        status = {"ok": 200, "stopping": 503}.get(service.state, 500)
        told = {"status": service.state, "model": served.model, "policy": served.policy}
        if service.error:
            told["error"] = service.error
        return JSONResponse(told, status)

    @app.api_route("/metrics", methods=readable)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def _complete(served: Served, request: Request, kind: type[Body]) -> Response:
    metrics = served.service.metrics
    request.state.accepted = False  # once it is, its ticket is counted
    try:
        return await _answered(served, request, kind)
    except ApiError as error:
        if not request.state.accepted:
            metrics.count(OUTCOMES.get(error.status, "invalid"))
        return response(error)
    except Cancelled:
        if not request.state.accepted:
            metrics.count("cancelled")
        return Response(status_code=499)  # nobody reads it


async def _answered(served: Served, request: Request, kind: type[Body]) -> Response:
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ApiError(
            415, f"Content-Encoding {coding[:64]!r} is not supported: send JSON as it is"
        )
    body = parse(kind, await _body(request, served.max_body))
    served.check_model(body.model)
    stops, sampling = body.stops, body.sampling(served.sampling, secrets.randbits(62))
    field, asked = body.limit
    with served.service.place():
        prompt = await _unless_gone(request.receive, served.encoder.prompt(body))
        limit = served.encoder.lengths.limit(len(prompt), asked, field)
        ticket = served.service.submit(prompt, limit, sampling)
    request.state.accepted = True
    parts = pieces(served.service, ticket, Writer(served.encoder.decode, stops))
    reply = Reply(served.model, kind is ChatBody, len(prompt), body.usage)
    # A stream begins with its first piece: until then, an error has a status of its own.
    first = await _unless_gone(request.receive, anext(parts))
    if body.stream:
        return StreamingResponse(
            reply.stream(first, parts),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def rest() -> list[Any]:
        return [first, *[piece async for piece in parts]]

    everything = await _unless_gone(request.receive, rest())
    text = "".join(piece.text for piece in everything)
    return JSONResponse(reply.whole(text, everything[-1]))


async def _body(request: Request, most: int) -> bytes:
    """The whole body, in time and within its limit."""
    too_large = ApiError(413, f"the body has more than {most} bytes", code="body_too_large",
                         headers={"Connection": "close"})  # fmt: skip
    said = request.headers.get("content-length", "")
    if said.isdecimal() and (len(said) > 18 or int(said) > most):
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise too_large
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except ClientDisconnect:
        raise Cancelled from None
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS} s",
                       headers={"Connection": "close"}) from None  # fmt: skip


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client hangs up first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        raise Cancelled from None
