"""Requests between the clients' tasks (asyncio, one thread) and the model (a thread of its own).

Tasks hand requests over through an inbox and get events back through their loop; each side touches
its own things only. What a task changes of a request is its flag `cancelled`.
"""

import asyncio
import itertools
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from kvpolicies.admission import Request
from kvpolicies.errors import UserError
from kvpolicies.loop import Event
from kvpolicies.sampling import Sampling
from kvpolicies.serve.errors import ApiError, retry_later
from kvpolicies.serve.metrics import Metrics
from kvpolicies.serving import Engine


class Ticket:
    """An accepted request, as its client's task sees it."""

    def __init__(self, request: Request):
        self.request = request
        self.outcome: str | None = None
        self.events: asyncio.Queue[Event | ApiError] = asyncio.Queue()
        self.latest = time.perf_counter()
        self.begun = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events up to the last; raises the ApiError that ended the request instead."""
        while True:
            event = await self.events.get()
            if isinstance(event, ApiError):
                raise event
            yield event
            if event.finish:
                return


class Service:
    """Runs an engine in a thread; made inside a running event loop.

    Args:
        waiting: most requests that wait for a row; more are refused with 429.
    """

    def __init__(self, engine: Engine, metrics: Metrics, waiting: int):
        self.engine, self.metrics, self.waiting = engine, metrics, waiting
        self.state, self.error = "ok", ""
        self.open: dict[int, Ticket] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self._tasks_loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()
        self._coming = 0
        self._closed = False
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._watched()
        self._thread.start()

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one that will `submit`: it counts as waiting while its prompt is made.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server stops, 500 when the model's
                thread has ended.
        """
        self._check()
        if len(self.open) + self._coming >= self.engine.rows + self.waiting:
            raise retry_later(429, "the queue is full; try again later", "queue_full")
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1

    def submit(self, prompt: Sequence[int], limit: int, sampling: Sampling) -> Ticket:
        """Queues a request, inside its `place`.

        Raises:
            ApiError: 400 for what the engine refuses, 503 when the server stops, 500 when the
                model's thread has ended.
        """
        self._check()
        try:
            request = self.engine.request(next(self._numbers), prompt, limit, sampling)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        ticket = self.open[request.index] = Ticket(request)
        self.metrics.prompt_tokens.inc(len(prompt))
        self.idle.clear()
        self._inbox.put(request)
        return ticket

    def cancel(self, ticket: Ticket, outcome: str = "cancelled") -> None:
        """Gives its row back within a forward; nothing happens to one that has ended."""
        if ticket.request.index in self.open and not ticket.request.cancelled:
            ticket.outcome = outcome
            ticket.request.cancelled = True
            self._inbox.put(None)

    async def stop(self, grace: float, at_once: asyncio.Event) -> None:
        """Refuses what comes and what waits, gives what runs `grace` seconds, ends the rest."""
        if self.state == "ok":
            self.state = "stopping"
        for ticket in list(self.open.values()):
            if ticket.request.row < 0:
                self._end(ticket, self._unavailable())
        ended = [asyncio.ensure_future(e.wait()) for e in (self.idle, at_once)]
        await asyncio.wait(ended, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for ticket in list(self.open.values()):
            self._end(ticket, self._unavailable())
        self._closed = True
        self._inbox.put(None)
        for task in ended:
            task.cancel()

    def join(self, seconds: float) -> bool:
        """Waits for the model's thread; False if a forward is still running."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _end(self, ticket: Ticket, error: ApiError) -> None:
        ticket.events.put_nowait(error)
        self.cancel(ticket, "failed" if error.status == 500 else "unavailable")

    def _check(self) -> None:
        if self.state != "ok":
            raise self._unavailable()

    def _unavailable(self) -> ApiError:
        if self.state == "failed":
            return ApiError(500, f"the model's thread has ended: {self.error}", code="failed")
        return retry_later(503, "the server is stopping", "stopping")

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while not self._closed:
                    self._take()
                    for event in self.engine.loop.advance():
                        self._tell(self._deliver, event)
        except BaseException as error:  # whatever it was, clients must not wait for ever
            traceback.print_exc(file=sys.stderr)
            self._tell(self._failed, error)

    def _take(self) -> None:
        """Moves new requests to the loop; waits for one where there is nothing else to do."""
        while not self._inbox.empty() or not (self.engine.loop.busy or self._closed):
            request = self._inbox.get()
            if request is not None:
                self.engine.loop.add(request)

    def _tell(self, function, *arguments) -> None:
        try:
            self._tasks_loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self._closed = True  # the event loop has ended, and with it all clients

    def _deliver(self, event: Event) -> None:
        ticket = self.open[event.index]
        ticket.events.put_nowait(event)
        self._timed(ticket, len(event.tokens))
        if event.finish:
            self._close(ticket, ticket.outcome or event.finish)

    def _timed(self, ticket: Ticket, tokens: int) -> None:
        now = time.perf_counter()
        if tokens and not ticket.begun:
            self.metrics.first_token.observe(now - ticket.latest)
        elif tokens:
            for _ in range(tokens):
                self.metrics.each_token.observe((now - ticket.latest) / tokens)
        if tokens:
            self.metrics.new_tokens.inc(tokens)
            ticket.begun, ticket.latest = True, now

    def _close(self, ticket: Ticket, outcome: str) -> None:
        del self.open[ticket.request.index]
        self.metrics.count(outcome)
        if not self.open:
            self.idle.set()

    def _failed(self, error: BaseException) -> None:
        first = next(iter(str(error).splitlines()), "")
        self.state, self.error = "failed", f"{type(error).__name__}: {first}"
        for ticket in list(self.open.values()):
            ticket.events.put_nowait(self._unavailable())
            self._close(ticket, "failed")

    def _watched(self) -> None:
        watch, loop, rows = self.metrics.watch, self.engine.loop, self.engine.rows
        watch("rows_in_use", "Rows with a request", lambda: len(loop.active))
        watch("rows_free", "Rows without a request", lambda: rows - len(loop.active))
        watch("queue_length", "Requests that wait for a row",
              lambda: max(0, len(self.open) + self._coming - len(loop.active)))  # fmt: skip
        cache, state = self.engine.cache_bytes(), self.engine.state_bytes()
        watch("cache_bytes", "Keys, values and positions of all rows", lambda: cache)
        watch("state_bytes", "The policy's own tensors of all rows", lambda: state)
