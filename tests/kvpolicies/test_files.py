"""Reading, writing and every other failure, as one line; files are whole or what they were."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from jinja2 import Template

from kvpolicies import files
from kvpolicies.errors import UserError, explained, one_line, rendering, shown
from kvpolicies.trace import NEVER, EvictionTrace
from kvpolicies.yamls import read_yaml

FULL = Path("/dev/full")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        ("folder", "is a directory"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"{", "malformed JSON (Expecting property name"),
        (b'{"a": 1}\n{', "line 2, column 1"),
        (b"[" * 100_000, "malformed JSON (nested too deeply)"),
        (b"9" * 5000, "malformed JSON (a number of 5,000 digits)"),
        (b"9" * 301, "malformed JSON (a number of 301 digits)"),
        (b'["\\ud800"]', "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_name(content, says, tmp_path):
    path = tmp_path / "file"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        files.read_json(path, "data")
    assert str(error.value).startswith(f"data {path}: ") and says in str(error.value)
    assert "\n" not in str(error.value)


def test_text_is_read_as_it_was_meant(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffann\r\nbob\u2028x\n".encode())
    assert files.read_lines(tmp_path / "a") == ["ann", "bob\u2028x"]
    (tmp_path / "b").write_bytes(b"")
    assert files.read_lines(tmp_path / "b") == []


class _Ends(NamedTuple):
    low: float
    high: float


def test_no_json_has_a_nan():
    value = {1: _Ends(0.5, math.inf), "b": (math.nan, "nan", {"c": [2, None, True]})}
    told = {"1": {"low": 0.5, "high": None}, "b": [None, "nan", {"c": [2, None, True]}]}
    assert files.without_nan(value) == told
    assert json.loads(json.dumps(files.without_nan(value), allow_nan=False)) == told


def test_a_device_without_an_end_is_not_read_to_it():
    with pytest.raises(UserError, match="without an end"):
        files.read_text("/dev/zero")


@pytest.mark.parametrize("before", [None, "before"])
def test_a_full_disk_leaves_what_was_there(before, tmp_path):
    path = tmp_path / "report.html"
    if before:
        path.write_text(before)
    says = r"report.html: cannot be written: no space left"
    with pytest.raises(UserError, match=says), files.writing(path) as half:
        half.write_text("half")
        full()
    assert [p.read_text() for p in tmp_path.iterdir()] == ([before] if before else [])


def test_a_kill_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_text("before")
    script = (
        "import os, sys; from pathlib import Path; from kvpolicies import files\n"
        "with files.writing(Path(sys.argv[1])) as half:\n"
        "    half.write_text('half'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")])
    assert (tmp_path / "a").read_text() == "before"


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_all_kinds_of_files_are_whole(tmp_path, monkeypatch):
    """Each kind of content, on a disk that takes nothing, and then on one that does."""
    trace = EvictionTrace(
        torch.full((1, 1, 1, 2), NEVER, dtype=torch.int32), torch.ones(1, 2).long()
    )
    write: dict[str, Callable[[Path], None]] = {
        "text": lambda path: files.write_text(path, "whole \ud800"),
        "json": lambda path: files.write_json(path, {"a": 1}),
        "csv": lambda path: files.write_csv(path, [["a", "b"], ["1,2", '"']]),
        "bytes": lambda path: files.write_bytes(path, b"whole"),
        "trace": trace.save,
    }
    for name, write_to in write.items():
        path = tmp_path / name
        path.write_text("before")
        half = path.with_name(f"{name}.{os.getpid()}.part")
        if name != "trace":  # safetensors makes a file of its own, whatever is there
            half.symlink_to(FULL)
            with pytest.raises(UserError, match=f"{name}: cannot be written: no space left"):
                write_to(path)
        with monkeypatch.context() as patch, pytest.raises(UserError, match="no space left"):
            patch.setattr(files.os, "replace", full)
            write_to(path)
        assert path.read_text() == "before" and not half.exists()
        write_to(path)
        assert path.read_bytes() != b"before"
    assert (tmp_path / "text").read_text() == "whole ?"
    assert list(csv.reader((tmp_path / "csv").open())) == [["a", "b"], ["1,2", '"']]
    assert EvictionTrace.load(tmp_path / "trace").tokens.tolist() == [[1, 1]]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(write)


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for content in ("a", "b"):
        with files.writing_folder(tmp_path / "model") as half:
            (half / content).write_text(content)
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["b"]
    with pytest.raises(UserError), files.writing_folder(tmp_path / "model") as half:
        full()
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "b"]


def test_what_is_no_file_is_not_replaced(tmp_path):
    for path in (Path("/dev/null"), tmp_path):
        with pytest.raises(UserError, match="it is no file"):
            files.write_text(path, "x")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    files.write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[a, b]: 1\n", "a key must be text"),
        (b"a: !!int ''\n", "no valid YAML"),
        (b"a: !!timestamp x\n", "no valid YAML"),
        (b'a: "\\ud800"\n', "half of a surrogate pair"),
        (b"a: &a [*a]\n", "more than 100,000 values"),
        (b"a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n", ""),
    ],
)
def test_odd_yaml(text, says, tmp_path):
    (tmp_path / "a.yaml").write_bytes(text)
    if not says:
        assert read_yaml(tmp_path / "a.yaml")["c"] == [[["x"], ["x"]]] * 2
        return
    with pytest.raises(UserError, match=f"a.yaml: .*{says}"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ 'a' + 1 }}", "{{ a.b.c }}"])
def test_a_template_that_fails_is_one_line(template):
    with (
        pytest.raises(UserError, match=r"the prompt cannot be rendered \(\w+Error"),
        rendering("the prompt"),
    ):
        Template(template).render()


def test_all_that_follows_from_the_world_is_explained_and_our_faults_are_not():
    from jinja2 import TemplateSyntaxError
    from safetensors import SafetensorError

    told = {
        OSError(28, "No space left on device", "a.csv"): "a.csv: no space left on device",
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, ""): "not UTF-8 text",
        RecursionError("maximum"): "nested too deeply",
        TemplateSyntaxError("odd", 1): "template",
        SafetensorError("header too large"): "header too large",
        MemoryError(): "out of memory",
        torch.OutOfMemoryError("CUDA out of memory."): "out of memory",
        RuntimeError("DefaultCPUAllocator: can't allocate memory"): "out of memory",
    }
    for error, says in told.items():
        assert says in (explained(error) or "")
    for error in (KeyError("a"), TypeError("b"), AssertionError(), RuntimeError("c")):
        assert explained(error) is None


def test_messages_stay_short_and_on_their_line():
    assert len(shown("x" * 5000)) < 250 and "5,000 characters" in shown("x" * 5000)
    assert len(shown([["x" * 99] * 99])) < 250
    assert len(one_line("x" * 5000)) < 250 and len(one_line("x y " * 5000)) < 1100
    assert one_line("a\nb \x1b[31m") == r"a b \x1b[31m"
    assert one_line("a word: known: b, c") == "a word: known: b, c"
