"""How a server of `kvpolicies serve` ends: told to stop, told again, or by a fault of its model."""

from __future__ import annotations

import json
import signal

import pytest

from kvpolicies.eval.tasks.ledger import make_problem
from tests.support.servers import BROKEN, server, until

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

LONG = {"model": "embedded", "prompt": make_problem(0, length=700).prompt, "stream": True}
PATH = "/v1/completions"


def test_told_to_stop_it_finishes_what_runs() -> None:
    with server("--budget", "48", "--batch-size", "1", "--grace", "600") as own:
        runs = own.post(PATH, LONG)
        begin = runs.recv(1 << 16)
        assert begin.startswith(b"HTTP/1.1 200")
        waits = own.post(PATH, LONG)
        until(lambda: own.metrics()["kvpolicies_queue_length"] == 1, "the second to wait")
        own.process.send_signal(signal.SIGTERM)
        until(lambda: own.ask("/health")[0] == 503, "it to stop accepting")
        status, headers, _ = own.ask(PATH, LONG)
        assert (status, headers["retry-after"]) == (503, "1")
        assert waits.recv(1 << 16).startswith(b"HTTP/1.1 503")
        text = begin + b"".join(iter(lambda: runs.recv(1 << 16), b""))
        assert b"[DONE]" in text and b'"error"' not in text
        assert own.process.wait(120) == 0


def test_a_second_signal_ends_what_runs() -> None:
    with server("--budget", "48", "--grace", "600") as own:
        runs = own.post(PATH, LONG)
        assert runs.recv(1 << 16).startswith(b"HTTP/1.1 200")
        own.process.send_signal(signal.SIGINT)
        until(lambda: own.ask("/health")[0] == 503, "it to stop accepting")
        assert own.end(signal.SIGINT) == 0
        assert b"the server is stopping" in b"".join(iter(lambda: runs.recv(1 << 16), b""))


def test_a_fault_of_the_model_fails_its_requests_and_shows_in_health() -> None:
    with server("--policy", "broken", "--budget", "48", setup=BROKEN) as own:
        ask = openai.OpenAI(base_url=own.url + "/v1", api_key="-", max_retries=0, timeout=120)
        with pytest.raises(openai.InternalServerError, match="NaN in a score"):
            ask.completions.create(model="embedded", prompt=LONG["prompt"])
        status, _, text = own.ask("/health")
        assert status == 500 and "NaN in a score" in json.loads(text)["error"]
        with pytest.raises(openai.InternalServerError, match="thread has ended"):
            ask.completions.create(model="embedded", prompt="ann")
        assert own.metrics()["kvpolicies_requests_total/failed"] == 2
        assert own.end() == 1
