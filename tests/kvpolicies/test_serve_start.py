"""What `kvpolicies serve` refuses before it loads a model."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvpolicies.cli import main
from tests.support.servers import server

pytest.importorskip("fastapi")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "oracle"], "looks ahead"),
        (["--policy", "beacn"], "did you mean 'beacon'"),
        (["--model", "./nowhere"], "no such folder"),
        (["--budget", "5"], "no slot to choose"),
        (["--max-length", "1"], "max_length must be at least 2"),
        (["--queue", "-1"], "queue must be at least 0"),
        (["--grace", "nan"], "--grace"),
        (["--port", "70000"], "--port must lie in"),
        (["--max-chars", "-1"], "max_chars must be at least 0"),
        (["--port", "0", "--cors-origins", "chat.example.com"], "--cors-origins: expected"),
        (["--port", "0", "--api-key", "two words"], "visible ASCII"),
        (["--host", "no.such.host.invalid"], "cannot listen on"),
        (["--host", "é" * 80], "cannot listen on"),
        (["--name", "\udcff"], "not UTF-8 text"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvpolicies.models.loading.load", None)
    assert main(["serve", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_port_in_use_and_an_unknown_key_and_a_missing_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvpolicies.models.loading.load", None)
    (tmp_path / "deploy.yaml").write_text("model: embedded\npolcy: beacon\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert main(["serve", str(tmp_path / "deploy.yaml")]) == 2
    from kvpolicies.eval.commands import serve

    monkeypatch.setitem(serve.NEEDED, "no_such_package", "no_such_package")
    assert main(["serve"]) == 2
    used, key, package = capsys.readouterr().err.splitlines()
    assert "in use" in used and "did you mean 'policy'" in key and "kvpolicies[serve]" in package


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_not_taken_for_none(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicies.models.loading.load", None)
    monkeypatch.setenv("KVPOLICIES_API_KEY", key)
    assert main(["serve", "--port", "0"]) == 2
    assert "KVPOLICIES_API_KEY is empty" in capsys.readouterr().err


def test_the_official_client_gives_the_key_that_the_environment_names() -> None:
    openai = pytest.importorskip("openai")
    setup = "import os; os.environ['KVPOLICIES_API_KEY'] = 'secret'"
    with server("--budget", "48", "--batch-size", "1", setup=setup) as own:
        assert own.ask("/health")[0] == 200 and own.ask("/v1/models")[0] == 401
        for key in ("secret", "public"):
            client = openai.OpenAI(base_url=own.url + "/v1", api_key=key, max_retries=0)
            if key == "secret":
                assert [m.id for m in client.models.list()] == ["embedded"]
                continue
            with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer KEY"):
                client.models.list()


def test_more_positions_than_the_model_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--max-length", "100000"]) == 2
    error = capsys.readouterr().err
    assert "max_length of 100000 tokens is longer than the 2048 positions" in error
    assert len(error.splitlines()) == 1
