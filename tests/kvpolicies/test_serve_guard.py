"""Who may ask a server: its API key, its names, and pages of other origins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvpolicies.errors import UserError

pytest.importorskip("fastapi")

from kvpolicies.serve.guard import Access
from tests.support.apps import app, engine
from tests.support.asgi import Answer, ask

TEXT = "/v1/completions"
BODY = {"prompt": "ann", "max_tokens": 1}
PAGE = "https://chat.example.com"
Headers = dict[str, str]


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Any, Any]]:
    with engine() as both:
        yield both


def asked(made: Any, access: Access, *requests: tuple[str, str, Headers]) -> list[Answer]:
    """The answers of one server to requests: method, path, headers."""

    async def scenario() -> list[Answer]:
        async with app(*made, access=access) as (own, _):
            return [await ask(own, m, path, BODY if m == "POST" else b"", h)
                    for m, path, h in requests]  # fmt: skip

    return asyncio.run(scenario())


def test_a_key_that_is_asked_for_is_needed(made: Any) -> None:
    wrong = ["", "Bearer", "Bearer ", "Bearer se", "Bearer secretx", "Basic secret", "secret",
             "Bearer sécret"]  # fmt: skip
    paths = [("POST", TEXT), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
             ("GET", "/metrics"), ("GET", "/nowhere")]  # fmt: skip
    access = Access(key="secret")
    refused = asked(made, access, *((m, p, {"authorization": w}) for m, p in paths for w in wrong))
    for answer in refused:
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key" and "secret" not in answer.error["message"]
    served = asked(made, access, ("POST", TEXT, {"authorization": "Bearer secret"}),
                   ("POST", TEXT, {"authorization": "bearer  secret"}),
                   ("GET", "/health", {}), ("HEAD", "/health", {}))  # fmt: skip
    assert [a.status for a in served] == [200] * 4


def test_without_a_key_any_is_taken(made: Any) -> None:
    (answer,) = asked(made, Access(), ("POST", TEXT, {"authorization": "Bearer -"}))
    assert answer.status == 200


LOCAL = ("localhost", "localhost:8000", "LOCALHOST.", "api.localhost:1", "127.0.0.1:8000",
         "127.9.9.9", "[::1]:8000", "")  # fmt: skip
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
           "[::1", "a b", "0.0.0.0", "x:y:z", "/", "localhost@evil.example")  # fmt: skip


def test_on_loopback_only_its_names_are_answered(made: Any) -> None:
    asks = [("POST", TEXT, {"host": host}) for host in (*LOCAL, *FOREIGN)]
    answers = asked(made, Access(), *asks)
    assert [a.status for a in answers] == [200] * len(LOCAL) + [403] * len(FOREIGN)
    assert {a.error["code"] for a in answers[len(LOCAL) :]} == {"host_not_allowed"}


def test_elsewhere_addresses_and_listed_names_are_answered(made: Any) -> None:
    access = Access(loopback=False, hosts=frozenset({"gpu7", "api.example.com"}))
    good = ("10.0.0.7:8000", "[fe80::1]:80", "gpu7", "API.example.com:443", "localhost")
    asks = [("GET", "/v1/models", {"host": host}) for host in (*good, "evil.example", "[::1")]
    assert [a.status for a in asked(made, access, *asks)] == [200] * len(good) + [403, 403]
    (answer,) = asked(made, Access(hosts=frozenset("*")), ("GET", "/health", {"host": "any.one"}))
    assert answer.status == 200


def test_pages_of_other_origins_may_not_ask(made: Any) -> None:
    foreign = (PAGE, "http://localhost:3000", "null", "http://127.0.0.1", "x", "http://[::1", "//a")
    asks = [("POST", TEXT, {"origin": o, "host": "localhost:8000"}) for o in foreign]
    preflight = {"origin": PAGE, "access-control-request-method": "POST"}
    answers = asked(made, Access(), *asks, ("OPTIONS", TEXT, preflight))
    for answer in answers:
        assert answer.status == 403 and answer.error["code"] == "origin_not_allowed"
        assert not any(name.startswith("access-control") for name in answer.headers)
    own = {"origin": "http://localhost:8000", "host": "localhost:8000"}
    rebound = {"origin": "http://evil.example:8000", "host": "evil.example:8000"}
    answers = asked(made, Access(), ("POST", TEXT, own), ("POST", TEXT, rebound))
    assert [a.status for a in answers] == [200, 403]


def test_pages_of_listed_origins_may_ask_and_read(made: Any) -> None:
    preflight = {"origin": PAGE, "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization, x-stainless-os"}  # fmt: skip
    access = Access(key="secret", origins=(PAGE,))
    with_key = {"origin": PAGE, "authorization": "Bearer secret"}
    before, after, keyless, other = asked(
        made, access, ("OPTIONS", TEXT, preflight), ("POST", TEXT, with_key),
        ("POST", TEXT, {"origin": PAGE}), ("POST", TEXT, {**with_key, "origin": PAGE + "x"}),
    )  # fmt: skip
    assert "x-stainless-os" in before.headers["access-control-allow-headers"]
    assert [a.status for a in (before, after, keyless, other)] == [200, 200, 401, 403]
    for answer in (before, after, keyless):  # a page reads why it is refused, too
        assert answer.headers["access-control-allow-origin"] == PAGE
    (answer,) = asked(made, Access(origins=("*",)), ("POST", TEXT, {"origin": "http://a.example"}))
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("key", ["two words", "schlüssel", "tab\t", "\n"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="visible ASCII"):
        Access(key=key)


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example/", "https://", "null"])
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(UserError, match="--cors-origins"):
        Access(origins=(origin,))
