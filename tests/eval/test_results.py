"""results.jsonl: append-only, whole lines, repaired after a kill."""

import json

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.results import NAME, WRITTEN, Key, Results, read_rows


def row(problem, **more):
    key = {"policy": "random", "budget": "8", "problem": problem, "sample": 0}
    return {**key, **dict.fromkeys(sorted(WRITTEN), 0), **more}


def test_rows_are_on_disk_as_soon_as_they_are_added(tmp_path):
    with Results(tmp_path) as results:
        assert results.add(row("a", text="λ\n"))
        assert read_rows(tmp_path / NAME) == [row("a", text="λ\n")]
        assert not results.add(row("a", text="again"))
        assert Key("random", "8", "a", 0) in results
    assert read_rows(tmp_path / NAME) == [row("a", text="λ\n")]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_half_written_last_line_is_cut_off(tmp_path, cut):
    path = tmp_path / NAME
    whole = json.dumps(row("a")) + "\n"
    path.write_text(whole + (json.dumps(row("b")) + "\n")[:-cut])
    assert read_rows(path) == [row("a")]
    with Results(tmp_path) as results:
        results.add(row("c"))
        assert path.read_text().startswith(whole)
        results.add(row("b"))
    assert read_rows(path) == [row("a"), row("c"), row("b")]


def test_reading_changes_nothing(tmp_path):
    path = tmp_path / NAME
    path.write_text(json.dumps(row("a")) + "\n{half")
    before = path.read_bytes()
    read_rows(path)
    assert path.read_bytes() == before


def test_a_broken_line_inside_is_an_error(tmp_path):
    path = tmp_path / NAME
    path.write_text('{"policy"\n' + json.dumps(row("a")) + "\n")
    with pytest.raises(UserError, match=r"results\.jsonl:1"):
        read_rows(path)


@pytest.mark.parametrize(
    "second",
    [row("a"), {k: v for k, v in row("b").items() if k != "finish"}, row("b", policy=["x"]), []],
)
def test_rows_that_no_run_wrote_are_refused(tmp_path, second):
    path = tmp_path / NAME
    path.write_text(json.dumps(row("a")) + "\n" + json.dumps(second) + "\n")
    with pytest.raises(UserError, match=r"jsonl:2: not a result row"):
        read_rows(path)
