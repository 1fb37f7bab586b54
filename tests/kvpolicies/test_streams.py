"""Standard output that is ASCII, closed, full or read by nobody; messages beside a bar."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from kvpolicies import streams

COMMAND = [sys.executable, "-m", "kvpolicies"]


def ran(argv: list[str], stdout: object, **env: str) -> tuple[int, str]:
    """(status, standard error)."""
    done = subprocess.run(
        [*COMMAND, *argv], stdout=stdout, stderr=subprocess.PIPE, text=True,  # type: ignore[arg-type]
        env={**os.environ, **env},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("argv", [["policies"], ["--help"], ["compare", "--help"], ["--version"]])
def test_a_full_standard_output_is_one_line(argv):
    with open("/dev/full", "w") as full:
        status, told = ran(argv, full)
    assert (status, told) == (2, "kvpolicies: standard output: no space left on device\n")


def test_a_refusal_is_told_though_standard_output_is_full():
    with open("/dev/full", "w") as full:
        status, told = ran(["compare", "nofile.yaml"], full)
    assert status == 2 and told.count("\n") == 1 and "nofile.yaml" in told


def test_whoever_reads_may_have_read_enough():
    read, write = os.pipe()
    os.close(read)
    status, told = ran(["policies"], write)
    os.close(write)
    assert (status, told) == (0, "")


def test_closed_streams_do_not_become_files_of_results(tmp_path):
    """The next file that is opened would get the number of standard output."""
    script = (
        "import os\n"
        "for n in (0, 1, 2): os.close(n)\n"
        "import sys; sys.stdin = sys.stdout = sys.stderr = None\n"  # as Python itself then starts
        "from kvpolicies import streams; streams.steady()\n"
        "file = open('results', 'w'); file.write('rows'); file.flush()\n"
        "print('printed'); os.write(1, b'by a library'); streams.say('told')\n"
        "sys.exit(streams.finish(0))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path).returncode == 0
    assert (tmp_path / "results").read_text() == "rows"


def test_an_encoding_that_lacks_letters_gets_escapes(tmp_path):
    (tmp_path / "λ.yaml").write_text("[")
    done = subprocess.run(
        [*COMMAND, "generate", "λ.yaml"], cwd=tmp_path, capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 2 and rb"\u03bb.yaml: no valid YAML" in done.stderr
    script = (
        "from kvpolicies import streams; from kvpolicies.eval.display.terminal import print_table\n"
        "streams.steady(); print_table('λ', ['–'], [['×']])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0 and rb"\u2013" in done.stdout and not done.stderr


def test_bytes_that_are_no_text_are_refused_as_arguments():
    done = subprocess.run([*COMMAND, "generate", "--prompt", b"caf\xe9"], capture_output=True)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert b"argument 3 is not UTF-8 text" in done.stderr


def test_a_message_does_not_stick_to_a_bar(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with tqdm(total=4, file=screen, mininterval=0) as bar:
        bar.update()
        streams.say("something")
        bar.update()
    (before,) = [part for part in screen.getvalue().split("\n") if "something" in part]
    assert before.rsplit("\r", 1)[1] == "kvpolicies: something"


def test_files_are_read_and_written_in_one_place():
    """What opens a file elsewhere has a reason that stands here."""
    allowed = {
        "kvpolicies/files.py",
        "kvpolicies/streams.py",  # /dev/null, for closed streams
        "eval/study/results.py",  # appends rows
        "eval/study/locks.py",  # locks
        "eval/sandbox/child.py",  # pipes of the sandbox
        "eval/study/provenance.py",  # /proc/cpuinfo, if it is there
        "kvpolicies/room.py",  # the memory of a control group, if there is one
        "eval/sandbox/running.py",  # what code in the sandbox must not do
    }
    root = Path(__file__).resolve().parents[2]
    words = (".read_text(", ".write_text(", ".read_bytes(", ".write_bytes(", " = open(",
             "with open(", ".open(\"", "savefig(path", "json.load(", "os.replace(")  # fmt: skip
    for room in ("kvpolicies", "beacon", "learned", "eval", "train"):
        for path in (root / room).rglob("*.py"):
            name = path.relative_to(root).as_posix()
            if name in allowed or path.is_symlink() or name.startswith("kvpolicies/" + room):
                continue
            text = path.read_text().replace("half.", "").replace("files.", "")
            for word in words:
                assert word not in text, f"{name}: {word}: use kvpolicies/files.py"
