"""Claims: one process at a time, given back by the system; rows of all files are one study's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.study import locks as claims
from kvpolicies.eval.study.locks import Claims
from kvpolicies.eval.study.results import NAME, Key, Results, read_folder, read_rows, shards
from tests.support.rows import row

ROOT = Path(__file__).resolve().parents[3]

HOLDER = """
import sys
from pathlib import Path
from kvpolicies.eval.study.locks import Claims
with Claims(Path(sys.argv[1])) as held:
    print([held.take(int(what)) for what in sys.argv[2:]], flush=True)
    sys.stdin.read()
"""


def holder(folder, *what):
    """A process that claims `what`, says what it got, and keeps it until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(folder), *map(str, what)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process) -> str:
    return process.stdout.readline()


def test_a_claim_excludes_other_processes_and_ends_with_a_kill(tmp_path):
    with Claims(tmp_path) as held:
        assert held.take(claims.unit(0)) and held.take(claims.unit(0))
        other = holder(tmp_path, claims.unit(0), claims.unit(1), claims.writer(0))
        assert said(other) == "[False, True, True]\n"
        assert not held.take(claims.unit(1))
        other.kill()
        other.wait()
        held.wait(claims.unit(1))
        held.release(claims.unit(0))
        after = holder(tmp_path, claims.unit(0), claims.unit(1))
        assert said(after) == "[True, False]\n"
        after.communicate("")


def test_each_writer_has_a_file_of_its_own(tmp_path):
    (tmp_path / "results.0001.jsonl").write_text('{"half')
    other = holder(tmp_path, claims.writer(0))
    assert said(other) == "[True]\n"
    with Results(tmp_path) as results:
        results.add(row("b"))
        assert [path.name for path in shards(tmp_path)] == ["results.0001.jsonl"]
        (tmp_path / NAME).write_text('{"policy": "not yet whole')
        assert results.refresh() == 0
        (tmp_path / NAME).write_text(json.dumps(row("a")) + "\n")
        assert results.refresh() == 1 and Key.of(row("a")) in results
        assert not results.add(row("a"))
    other.communicate("")
    assert read_folder(tmp_path) == [row("a"), row("b")]


def test_merging_keeps_every_row_once_and_in_order(tmp_path):
    lines = {"results.0001.jsonl": [row("d"), row("b")], NAME: [row("c"), row("b", seconds=9)]}
    for name, rows in lines.items():
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    whole = [row("b", seconds=9), row("c"), row("d")]
    assert read_folder(tmp_path) == whole
    with Results(tmp_path) as results:
        results.merge()
        assert results.refresh() == 0
    assert shards(tmp_path) == [tmp_path / NAME]
    assert read_rows(tmp_path / NAME) == whole


def test_whoever_is_done_does_not_merge_while_another_appends(tmp_path):
    (tmp_path / "results.0001.jsonl").write_text(json.dumps(row("b")) + "\n")
    other = holder(tmp_path, claims.writer(1))
    assert said(other) == "[True]\n"
    with Results(tmp_path) as results:
        results.add(row("a"))
        results.merge()
        assert len(shards(tmp_path)) == 2
        other.communicate("")
        assert results.add(row("c"))  # its own file was closed, not lost
        results.merge()
    assert shards(tmp_path) == [tmp_path / NAME]
    assert read_folder(tmp_path) == [row("a"), row("b"), row("c")]


def test_rows_in_memory_only(tmp_path):
    with Results(tmp_path, writes=False) as results:
        assert results.add(row("a")) and not results.add(row("a"))
    assert shards(tmp_path) == []


def test_one_process_does_not_run_two_studies_in_a_folder(tmp_path):
    with Claims(tmp_path) as held:
        assert held.take(claims.FOLDER)
        with pytest.raises(UserError, match="already runs"), Claims(tmp_path):
            pass
        other = holder(tmp_path, claims.FOLDER)
        assert said(other) == "[False]\n"  # the refusal gave nothing back
        other.communicate("")
    with Claims(tmp_path):
        pass


@pytest.mark.parametrize(
    "command",
    [
        ["revisit", "--policies", "full"],
        ["bench", "--policies", "full"],
        ["train", "ledger-kvpop"],
    ],
    ids=lambda command: command[0],
)
def test_a_second_process_in_a_folder_of_one_is_refused_before_it_works(
    tmp_path, capsys, monkeypatch, command
):
    from kvpolicies.cli import main
    from kvpolicies.models import loading

    monkeypatch.setattr(loading, "load", None)
    other = holder(tmp_path, claims.writer(0))
    assert said(other) == "[True]\n"
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert f"{tmp_path}: another process is at work there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [claims.NAME]
    other.communicate("")


def test_alone_waits_for_nobody_and_leaves_the_folder_free(tmp_path):
    claims.check_free(tmp_path / "none")
    with claims.alone(tmp_path):
        other = holder(tmp_path, claims.writer(0), claims.FOLDER)
        assert said(other) == "[False, True]\n"
        other.communicate("")
    claims.check_free(tmp_path)
    with claims.reporting(tmp_path):
        other = holder(tmp_path, claims.FOLDER)
        assert said(other) == "[False]\n"
        other.communicate("")
