"""Who may ask: the names of this server, pages of other origins, and the API key.

A browser sends any page's requests to any server that it reaches, a loopback one included. What
gives such a page away are its `Origin`, and, where its own name was pointed at this machine, its
`Host`. Programs send neither a foreign `Host` nor an `Origin`.
"""

import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpolicies.errors import UserError
from kvpolicies.serve.errors import ApiError, response

ANY = "*"
OPEN = ("/health",)
"""Paths that need no key: whoever starts and stops servers asks there."""


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Raises:
        UserError: a key that no header can carry, an origin that is none.
    """

    loopback: bool = True
    """Only this machine can connect; names and addresses that are not its own are then foreign."""
    key: str = ""
    """What `Authorization: Bearer` must carry; empty: nothing is asked for."""
    hosts: frozenset[str] = frozenset()
    """Names of this server, lower case, beside its addresses and localhost; * = any."""
    origins: tuple[str, ...] = ()
    """Origins whose pages may ask and read (CORS); * = all."""

    def __post_init__(self) -> None:
        if not all("!" <= c <= "~" for c in self.key):
            raise UserError("the API key must be of visible ASCII characters without spaces")
        for origin in self.origins:
            if origin != ANY and not _is_origin(origin):
                raise UserError(
                    f"--cors-origins: expected origins such as https://chat.example.com, "
                    f"without a path, or *; got {origin!r}"
                )

    def guard(self, app: FastAPI) -> None:
        """Puts the checks around the application, the outermost last."""
        if self.key:
            app.add_middleware(_Checked, check=self.has_key)
        if self.origins:
            app.add_middleware(
                CORSMiddleware, allow_origins=self.origins, allow_methods=("GET", "HEAD", "POST"),
                allow_headers=(ANY,), expose_headers=("Retry-After",),
            )  # fmt: skip
        app.add_middleware(_Checked, check=self.is_known)

    def has_key(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError (401) unless the request carries the key."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        # Both are compared whatever they are, and in a time that tells nothing of the key.
        same = secrets.compare_digest(given.strip().encode(), self.key.encode())
        if scope["path"] not in OPEN and not (same and kind.lower() == "bearer"):
            raise ApiError(
                401, "this server needs its API key: Authorization: Bearer KEY",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    def is_known(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError (403) for a name that is not this server's, or a page of elsewhere."""
        host = headers.get("host", "")
        if host and not self._is_ours(host):
            raise ApiError(
                403, f"Host {host!r} is no name of this server; if it should be, start it "
                "with --allow-hosts", code="host_not_allowed",
            )  # fmt: skip
        for origin in headers.getlist("origin"):
            listed = ANY in self.origins or origin in self.origins
            if not listed and not (host and _is_origin(origin) and _same(origin, host)):
                raise ApiError(
                    403, f"pages of origin {origin!r} may not ask this server; if they "
                    "should, start it with --cors-origins", code="origin_not_allowed",
                )  # fmt: skip

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if ANY in self.hosts or name in self.hosts:
            return True
        try:  # an address cannot be pointed elsewhere, as a name can
            return ipaddress.ip_address(name).is_loopback or not self.loopback
        except ValueError:
            return name == "localhost" or name.endswith(".localhost")


class _Checked:
    """An application behind a check, which raises the ApiError that is answered instead."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope, Headers], None]):
        self.app, self.check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self.check(scope, Headers(scope=scope))
        except ApiError as error:
            await response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        return False


def _same(origin: str, host: str) -> bool:
    """Whether a page of `origin` asks the server that it came from, as it calls it."""
    return urlsplit(origin).netloc.lower() == host.lower()
