"""A real `kvpolicies serve` process on a free port, and plain ways to talk to it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240
"""Seconds until a condition that does not come is a failure: a loaded machine is slow."""
BROKEN = (
    "from kvpolicies import registry; registry.POLICIES['broken'] = 'tests.support.broken:Broken'"
)
MAIN = "import sys; from kvpolicies.cli import main; sys.exit(main(sys.argv[1:]))"


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen, line: str):
        self.process, self.line = process, line.strip()
        self.url = self.line.rsplit(" on ", 1)[1]
        self.place = urlsplit(self.url)

    def ask(self, path: str, body: Any = None) -> tuple[int, dict[str, str], str]:
        """(status, headers, text) of a GET, or of a POST of bytes or of JSON."""
        connection = HTTPConnection(str(self.place.hostname), self.place.port, timeout=PATIENCE)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            headers = {k.lower(): v for k, v in answer.getheaders()}
            return answer.status, headers, answer.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by its name with labels, through Prometheus' own parser."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.ask("/metrics")[2]
        return {
            "/".join([s.name, *s.labels.values()]): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }

    def connect(self, sent: bytes = b"") -> socket.socket:
        """A connection on which so much has been sent."""
        sock = socket.create_connection((self.place.hostname, self.place.port or 80), PATIENCE)
        sock.sendall(sent)
        return sock

    def post(self, path: str, body: Any) -> socket.socket:
        """A connection on which a request has been sent, and nothing read."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        return self.connect(head.encode() + data)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signals it, and waits for its exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of a condition that another process brings about."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.02)  # a look that never rests takes the other process's core
    return value


@contextmanager
def server(*options: str, setup: str = "") -> Iterator[Server]:
    """Starts a server with these options, and kills it at the end if it still runs."""
    command = [sys.executable, "-c", f"{setup}\n{MAIN}", "serve", "--port", "0", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            assert "kvpolicies: serving" in line, line
            yield Server(process, line)
        finally:
            process.kill()
