"""`kvpolicies vllm` as its users meet it: vLLM's server in processes of its own, asked by OpenAI's
client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.vllm.conftest import NEW

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 280


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    folder = tmp_path_factory.mktemp("server")
    deploy = folder / "deploy.yaml"
    deploy.write_text("policy: h2o\nbudget: 101\nmax_length: 1024\nbatch_size: 4\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvpolicies", "vllm", str(deploy), "--port", str(port)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "--vllm", "--enforce-eager"],
            cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + PATIENCE
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return urlopen(url, timeout=5).status == 200
    except (URLError, OSError):
        return False


@pytest.mark.timeout(PATIENCE + 120)
def test_the_server_streams_what_generate_gives(
    server: str, prompts: list[list[int]], expected: Callable[..., list[list[int]]]
) -> None:
    import openai

    client = openai.OpenAI(base_url=server, api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["embedded"]

    def ask(number: int, **extra: Any) -> Any:
        return client.completions.create(
            model="embedded", prompt=prompts[number], max_tokens=NEW,
            extra_body={"return_token_ids": True, **extra},
        )  # fmt: skip

    for number in (1, 2, 5):
        answer = ask(number)
        assert answer.choices[0].token_ids == expected("h2o")[number]
        streamed = client.completions.create(
            model="embedded", prompt=prompts[number], max_tokens=NEW, stream=True
        )
        assert "".join(part.choices[0].text for part in streamed) == answer.choices[0].text
    fewer = ask(1, vllm_xargs={"kv_budget": 60})
    assert fewer.choices[0].token_ids == expected("h2o", 60)[1]
    with pytest.raises(openai.BadRequestError, match="at most 101 here, got 102"):
        ask(1, vllm_xargs={"kv_budget": 102})
    assert ask(1).choices[0].token_ids == expected("h2o")[1]
