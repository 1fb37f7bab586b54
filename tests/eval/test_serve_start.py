"""What `kvpolicies serve` refuses before it loads a model."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvpolicies.cli import main

pytest.importorskip("fastapi")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "oracle"], "looks ahead"),
        (["--policy", "beacn"], "did you mean 'beacon'"),
        (["--model", "./nowhere"], "no such folder"),
        (["--budget", "5"], "no slot to choose"),
        (["--max-length", "1"], "max_length must be at least 2"),
        (["--queue", "-1"], "--queue must be at least 0"),
        (["--grace", "nan"], "--grace"),
        (["--port", "70000"], "--port must lie in"),
        (["--host", "no.such.host.invalid"], "cannot listen on"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvpolicies.eval.models.load", None)
    assert main(["serve", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_port_in_use_and_an_unknown_key_and_a_missing_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvpolicies.eval.models.load", None)
    (tmp_path / "deploy.yaml").write_text("model: embedded\npolcy: beacon\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert main(["serve", str(tmp_path / "deploy.yaml")]) == 2
    from kvpolicies.eval.commands import serve

    monkeypatch.setitem(serve.NEEDED, "no_such_package", "no_such_package")
    assert main(["serve"]) == 2
    used, key, package = capsys.readouterr().err.splitlines()
    assert "in use" in used and "did you mean 'policy'" in key and "kvpolicies[serve]" in package


def test_more_positions_than_the_model_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--max-length", "100000"]) == 2
    error = capsys.readouterr().err
    assert "max_length of 100000 tokens is longer than the 2048 positions" in error
    assert len(error.splitlines()) == 1
