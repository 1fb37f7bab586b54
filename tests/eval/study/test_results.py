"""results.jsonl: append-only, whole lines, repaired after a kill; only a study's own rows count."""

import json
import math

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.study.records import FULL, Grid
from kvpolicies.eval.study.results import NAME, Key, Results, find_rows, read_rows
from kvpolicies.eval.tasks.measures import ACCURACY, LOOKUPS, NLL
from tests.support.rows import row

GRID = Grid(
    frozenset({(FULL, FULL), ("random", "8")}), frozenset("abc"), 2, 10, (ACCURACY, LOOKUPS)
)


def graded(problem, **more):
    return row(problem, **{"correct": 1, "lookups_right": 2, "lookups": 3, **more})


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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"sample": True}, "sample must be a whole number from 0 to 2^53, got True"),
        ({"sample": 1.0}, "sample must be a whole number"),
        ({"policy": ["x"]}, "policy must be text"),
        ({"problem": 7}, "problem must be text"),
        ({"cache_bytes": 10**25}, "cache_bytes must be a whole number from 0 to 2^53"),
        ({"length": -1}, "length must be a whole number from 0 to 2^53, got -1"),
        ({"slots": "8"}, "slots must be a whole number"),
        ({"seconds": math.nan}, "no JSON"),
        ({"seconds": -0.5}, "seconds must be seconds >= 0"),
        ({"finish": "cancelled"}, "finish must be stop or length"),
        ({"tokens": [1, None]}, "tokens must be a list of a whole number"),
        ({"text": 5}, "text must be text"),
        ({"prompt_tokens": -3}, "prompt_tokens must be"),
        ({"correct": 1.5}, "correct must be a number from 0 to 1"),
        ({"correct": "1"}, "correct must be"),
        ({"lookups": True}, "lookups must be a whole number"),
        ({"lookups_right": None}, "lookups_right must be a finite number"),
        ({"held": []}, "held must be keys and values"),
        ({"held": {"pieces": "x"}}, "held: pieces must be a list of text"),
        ({"controls": {"same_length": {"cut": 1}}}, "controls: same_length: length is missing"),
        ({"problem": "d"}, "problem 'd' is none of the study's"),
        ({"sample": 2}, "sample 2 is none of the study's 2"),
        ({"policy": "random(seed=1)"}, "random(seed=1) at 8 is none of the study's cells"),
        ({"length": 11}, "length 11 is above max_new_tokens 10"),
        ({"problem": "a"}, "repeats a row"),
        ("[]", "no JSON object"),
        ('{"policy"', "no JSON"),
        ("[" * 9000, "no JSON"),
        (b"\xff", "no JSON"),
    ],
)
def test_what_is_no_row_of_the_study_counts_nowhere_and_is_told(tmp_path, line, says):
    path, good = tmp_path / NAME, [graded("a"), graded("b", sample=1)]
    if isinstance(line, dict):
        line = json.dumps({**graded("c"), **line})
    bad = line if isinstance(line, bytes) else line.encode()
    lines = [json.dumps(good[0]).encode(), bad, json.dumps(good[1]).encode()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    found = find_rows(tmp_path, GRID)
    assert found.rows == good and len(found.dropped) == 1
    assert f"1 line of results counts nowhere: {NAME}:2 ({says}" in found.said(tmp_path)
    with Results(tmp_path, GRID) as results:
        assert results.found == found
        missing = Key("random", "8", "c", 0) not in results
        assert missing and results.add(graded("c"))
        results.merge()
    assert path.read_bytes().startswith(before) and len(find_rows(tmp_path, GRID).rows) == 3


def test_many_lines_are_told_of_in_one(tmp_path):
    (tmp_path / NAME).write_text("x\n" * 9)
    said = find_rows(tmp_path).said(tmp_path)
    assert "9 lines of results count nowhere: results.jsonl:1 (no JSON); " in said
    assert said.endswith("; and 6 more") and "\n" not in said


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_no_reader_would_take_is_not_written(tmp_path, value):
    grid = Grid(frozenset({("random", "8")}), None, 1, math.inf, (NLL,))
    with Results(tmp_path, grid) as results:
        with pytest.raises(UserError, match="random at 8, problem 'a': nll must be a finite"):
            results.add(row("a", nll=value))
        assert results.add(row("a", nll=0.5))
    assert read_rows(tmp_path / NAME) == [row("a", nll=0.5)]
