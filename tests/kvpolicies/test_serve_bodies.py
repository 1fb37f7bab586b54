"""Bodies that a server refuses, each in one line that names the field, and those it takes."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from kvpolicies.serve.bodies import ChatBody, TextBody, parse
from kvpolicies.serve.errors import ApiError
from tests.support.apps import app, engine
from tests.support.asgi import ask

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
NINES = b"9" * 4200


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Any, Any]]:
    with engine() as both:
        yield both


def prompted(**fields: Any) -> dict[str, Any]:
    return {"prompt": "ann", **fields}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


BAD: list[tuple[str, Any, str | None, str]] = [
    (TEXT, b"{", None, "Invalid JSON"),
    (TEXT, b"[" * 9000, None, "recursion limit"),
    (TEXT, b'{"prompt":"a","metadata":' + b"[" * 9000, None, "recursion limit"),
    (TEXT, b'"text"', None, "should be an object, got 'text'"),
    (TEXT, b"null", None, "should be an object, got None"),
    (TEXT, b'{"prompt": "\\ud800"}', None, "Invalid JSON"),
    (TEXT, b'{"prompt": "\xed\xa0\x80"}', None, "Invalid JSON"),
    (TEXT, '{"prompt": "é"}'.encode("latin-1"), None, "Invalid JSON in UTF-8"),
    (TEXT, '{"prompt": "ann"}'.encode("utf-16"), None, "Invalid JSON in UTF-8"),
    (TEXT, b"9" * 90_000, None, "Invalid JSON"),
    (TEXT, b'{"prompt":"ann","temperature":NaN}', "temperature", "finite number, got nan"),
    (TEXT, b'{"prompt":"ann","temperature":1e999}', "temperature", "finite number, got inf"),
    (TEXT, b'{"prompt":"ann","min_p":NaN}', "min_p", "not supported here but for 0"),
    (TEXT, b'{"prompt":"ann","seed":' + NINES + b"}", "seed", "less than 9223372036854775808"),
    (TEXT, b'{"prompt":"ann","max_tokens":' + NINES + b"}", "max_tokens", "at most 100 here"),
    (TEXT, b'{"prompt":[' + NINES + b"]}", "prompt", "token ids go from 0 to"),
    (TEXT, b'{"prompt":"ann","top_k":' + NINES + b"}", "top_k", "less than 2147483648"),
    (TEXT, prompted(stop=5), "stop", "expected a string, or a list of at most 4 strings, got 5"),
    (TEXT, prompted(stop=[5]), "stop", "expected a string, or a list of at most 4 strings, got"),
    (TEXT, prompted(stop=["a", 5]), "stop[1]", "valid string, got 5"),
    (TEXT, prompted(stop=["a", ""]), "stop[1]", "at least 1 character"),
    (TEXT, prompted(stop="x" * 9000), "stop", "at most 256 characters"),
    (TEXT, {"prompt": 5}, "prompt", "expected a string, or a list of token ids, got 5"),
    (TEXT, {"prompt": {"a": 1}}, "prompt", "expected a string, or a list of token ids"),
    (TEXT, {"prompt": [True]}, "prompt", "expected a string, or a list of token ids"),
    (TEXT, {"prompt": [5, "ann"]}, "prompt[1]", "valid integer, got 'ann'"),
    (TEXT, {"prompt": [5, 1.5]}, "prompt[1]", "valid integer, got 1.5"),
    (TEXT, prompted(temperature=1e-300), "temperature", "must be 0 (greedy) or at least 0.001"),
    (TEXT, prompted(temperature="hot"), "temperature", "valid number, got 'hot'"),
    (TEXT, prompted(top_k=-2), "top_k", "greater than or equal to -1"),
    (TEXT, prompted(stream_options=[]), "stream_options", "got []"),
    (TEXT, prompted(min_p=0.1), "min_p", "not supported here but for 0"),
    (TEXT, prompted(ignore_eos=True), "ignore_eos", "not supported here but for False"),
    (TEXT, prompted(n=True), "n", "not supported here but for 1"),
    (TEXT, prompted(**{"x" * 9000: 1}), "x" * 64, "unknown field"),
    (TEXT, prompted(model="x" * 9000), "model", "is not served here"),
    (CHAT, {"messages": "hi"}, "messages", "valid list, got 'hi'"),
    (CHAT, said(), "messages", "at least 1 item"),
    (CHAT, said("hi"), "messages[0]", "got 'hi'"),
    (CHAT, said(user("ann"), {"role": "tool", "content": "7"}), "messages[1].role", "got 'tool'"),
    (CHAT, said({"content": "ann"}), "messages[0].role", "Field required"),
    (CHAT, said(user(None)), "messages[0].content", "a user message needs a content"),
    (CHAT, said({"role": "user"}), "messages[0].content", "a user message needs a content"),
    (CHAT, said(user(5)), "messages[0].content", 'a list of {"type": "text"'),
    (CHAT, said(user(["ann"])), "messages[0].content", 'a list of {"type": "text"'),
    (CHAT, said(user([{"type": "image_url"}])), "messages[0].content[0].type", "got 'image_url'"),
    (CHAT, said(user([{"type": "text"}])), "messages[0].content[0].text", "Field required"),
    (CHAT, said(user("ann", name=5)), "messages[0].name", "valid string, got 5"),
    (CHAT, said(user("ann", tool_calls=[1])), "messages[0].tool_calls", "not supported"),
    (CHAT, said(user("ann", reasoning_content="x")), "messages[0].reasoning_content", "only an"),
]


def test_bad_bodies_are_refused_in_one_line_that_names_the_field(made: Any) -> None:
    async def scenario() -> list[Any]:
        async with app(*made) as (own, _):
            return [await ask(own, "POST", path, body) for path, body, *_ in BAD]

    for (_, body, param, message), answer in zip(BAD, asyncio.run(scenario()), strict=True):
        what = str(body)[:80], answer.body[:300]
        error = answer.error
        assert answer.status in (400, 404) and set(error) == {"message", "type", "param", "code"}, (
            what
        )
        assert message in error["message"] and error["param"] == param, what
        assert "\n" not in error["message"] and len(error["message"]) < 1200, what


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**400, -(10**400), 0.0, 1e-300, 0.5, 1e308,
    "", "ann", "\x00", "\U0001f600", "<eos>", "x" * 5000, [], [[]], [[[]]], [1], [-1], [0.5],
    ["ann"], [None], [1, "ann"], [[1], [2]], {}, {"a": 1}, {"type": "text"}, [{}],
    {"type": "text", "text": "ann"}, [{"role": "user"}], [{"role": "user", "content": "ann"}],
    [{"type": "text", "text": "ann"}], [{"type": "text", "text": 1}],
]  # fmt: skip
FIELDS = [
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed", "stop", "stream", "stream_options", "n", "logit_bias", "tools", "user",
    "response_format", "role", "content", "min_p", "echo", "", "\x00",
]  # fmt: skip


def strange(rng: random.Random, path: str) -> dict[str, Any]:
    """A body that is nearly right."""
    body: dict[str, Any] = {"prompt": "ann"} if path == TEXT else {"messages": [user("ann")]}
    body["max_tokens"] = 1
    for _ in range(rng.randrange(1, 3)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    if path == CHAT and rng.random() < 0.5:
        turn: Any = {"role": rng.choice(["user", "assistant", "system", rng.choice(VALUES)])}
        for key in rng.choices(["content", "name", "reasoning_content", "tool_calls", "x"], k=2):
            turn[key] = rng.choice(VALUES)
        body["messages"] = [turn, user("ann")]
    return body


def test_no_body_makes_a_server_fail(made: Any) -> None:
    rng = random.Random(0)

    async def scenario() -> None:
        async with app(*made) as (own, served):
            seen: Counter[int] = Counter()
            for path in (TEXT, CHAT) * 400:
                body = strange(rng, path)
                answer = await ask(own, "POST", path, body)
                seen[answer.status] += 1
                if answer.status != 200:
                    assert answer.status in (400, 404), (body, answer.body[:300])
                    message = answer.error["message"]
                    assert message and "\n" not in message and len(message) < 1500
            assert served.service.state == "ok" and min(seen[200], seen[400]) > 20

    asyncio.run(scenario())


NEUTRAL: dict[str, Any] = {
    "min_p": 0, "repetition_penalty": 1, "top_k": -1, "ignore_eos": False,
    "skip_special_tokens": True, "presence_penalty": 0.0, "frequency_penalty": 0, "n": 1,
    "best_of": 1, "logit_bias": {}, "logprobs": None, "stream": None, "stop": None, "seed": None,
    "user": "me", "metadata": {"a": "b"}, "min_tokens": 0, "stop_token_ids": [], "tools": [],
    "tool_choice": "none", "response_format": {"type": "text"}, "guided_json": None,
    "length_penalty": 1.0, "include_stop_str_in_output": False, "echo": False,
}  # fmt: skip
TURNS = [
    {"role": "developer", "content": "ann", "name": "boss"},
    user("bob", name="me"),
    {"role": "assistant", "content": None, "reasoning_content": "ann", "refusal": None,
     "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    user([{"type": "text", "text": "ann"}, {"type": "text", "text": "bob"}]),
    {"role": "assistant", "content": "ann", "reasoning_content": None},
    user("ann"),
]  # fmt: skip


def test_values_that_change_nothing_change_nothing(made: Any) -> None:
    async def scenario() -> None:
        async with app(*made) as (own, _):
            for path, body in ((TEXT, prompted(max_tokens=4)),
                               (CHAT, {"messages": TURNS, "max_tokens": 4})):  # fmt: skip
                plain = (await ask(own, "POST", path, body)).json
                for more in (NEUTRAL, *({key: value} for key, value in NEUTRAL.items())):
                    answer = await ask(own, "POST", path, {**body, **more})
                    assert answer.status == 200, (more, answer.body)
                    assert answer.json["choices"] == plain["choices"]
                    assert answer.json["usage"] == plain["usage"]

    asyncio.run(scenario())


def test_an_answer_may_have_thought(made: Any) -> None:
    turns = parse(ChatBody, json.dumps({"messages": TURNS}).encode()).turns()
    assert turns[0] == {"role": "system", "content": "ann"}
    assert turns[2] == {"role": "assistant", "content": "", "reasoning_content": "ann"}
    assert turns[3] == {"role": "user", "content": "ann\nbob"}
    assert turns[4] == {"role": "assistant", "content": "ann"}


def test_models_and_health_are_found(made: Any) -> None:
    async def scenario() -> None:
        async with app(*made) as (own, _):
            found = await ask(own, "GET", "/v1/models/embedded")
            listed = await ask(own, "GET", "/v1/models")
            assert listed.json["data"] == [found.json] and found.json["id"] == "embedded"
            unknown = await ask(own, "GET", "/v1/models/Qwen/Qwen3-4B")
            assert unknown.status == 404 and unknown.error["code"] == "model_not_found"
            for path in ("/health", "/v1/models", "/metrics"):
                assert (await ask(own, "HEAD", path)).status == 200
            odd = await ask(own, "GET", "/nowhere/" + "x" * 9000, headers={"host": "[::1]"})
            assert odd.status == 404 and len(odd.error["message"]) < 300
            packed = await ask(own, "POST", TEXT, prompted(), {"content-encoding": "gzip"})
            assert packed.status == 415 and "gzip" in packed.error["message"]
            assert (await ask(own, "PUT", TEXT)).status == 405

    asyncio.run(scenario())


def test_a_model_may_have_slashes_in_its_name(made: Any) -> None:
    async def scenario() -> None:
        from dataclasses import replace

        from kvpolicies.serve.app import make_app

        async with app(*made) as (_, served):
            own = make_app(replace(served, model="Qwen/Qwen3-4B"))
            assert (await ask(own, "GET", "/v1/models/Qwen/Qwen3-4B")).json["id"] == "Qwen/Qwen3-4B"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (TextBody, {"prompt": [1] * 999 + ["x"] * 999}),
        (TextBody, {"prompt": ["x"] * 999 + [1] * 999}),
        (TextBody, {"prompt": [None] * 999}),
        (TextBody, {"prompt": [["x"]] * 999}),
        (TextBody, {"prompt": "ann", "stop": [1] * 999}),
        (ChatBody, {"messages": [{}] * 999}),
        (ChatBody, {"messages": [user("")] * 9999}),
        (ChatBody, {"messages": [user([1] * 999)]}),
        (ChatBody, {"messages": [user([{"type": "x"}] * 999)]}),
    ],
)
def test_a_bad_body_is_refused_at_its_first_fault(kind: Any, body: Any) -> None:
    """Collecting the faults of a megabyte took seconds of everybody's time."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 2  # a message lacks two fields
    with pytest.raises(ApiError):
        parse(kind, json.dumps(body).encode())
