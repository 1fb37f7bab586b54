"""Sockets, signals and the end: the process around the application."""

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpolicies.errors import UserError
from kvpolicies.serve.app import Served, make_app
from kvpolicies.serve.errors import ApiError, response

HEADER_SECONDS = 30
"""A request's headers must have arrived by then."""
LAST_SECONDS = 2
"""For what still has to be written when everything has ended."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: taken before a model is loaded, so that a port in use is known at once.

    Raises:
        UserError: if it cannot be had.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port must lie in 0..65535, got {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Two servers could share a port on some systems; create_server refuses that on POSIX.
        return socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # a name that DNS cannot spell is the latter
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port"
        ) from None


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can connect to a listening socket."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def address(sock: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Punctual(H11Protocol):
    """Closes a connection on which a request's headers stay incomplete, and refuses in JSON."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.deadline:
            self.deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP: like every other refusal."""
        body = bytes(response(ApiError(400, msg)).body)
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))),
                   ("Connection", "close")]  # fmt: skip
        events = (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
        )
        for event in (*events, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _between(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _arm(self) -> None:
        if not self._between and self.deadline:
            self.deadline.cancel()
            self.deadline = None
        elif self._between and not self.deadline:
            self.deadline = self.loop.call_later(HEADER_SECONDS, self._late)

    def _late(self) -> None:
        self.deadline = None
        if self._between and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """Signals are this module's affair."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(make: Callable[[], Served], sock: socket.socket, grace: float) -> int:
    """Serves until SIGTERM or SIGINT; 0 after a graceful end, 1 if the model's thread had ended.

    Args:
        make: called inside the event loop. grace: seconds for running requests when it ends; a
            second signal ends them at once.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    _many_files()
    gc.freeze()  # the model's objects stay; looking through them held every large body up
    return asyncio.run(_run(make, sock, grace))


async def _run(make: Callable[[], Served], sock: socket.socket, grace: float) -> int:
    asked, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    served = make()
    config = uvicorn.Config(
        make_app(served), http=_Punctual, ws="none", lifespan="off", log_config=None,
        access_log=False, server_header=False, timeout_graceful_shutdown=LAST_SECONDS,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    waiting = asyncio.ensure_future(asked.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    await served.service.stop(grace, at_once)
    served.encoder.close()
    server.should_exit = True
    await serving
    served.service.join(LAST_SECONDS)
    return 1 if served.service.state == "failed" else 0


def _many_files() -> None:
    """Raises the number of open connections to what the system lets this process have."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
