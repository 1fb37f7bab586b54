"""Tasks: reading problems, what bad data says, grading a ledger text."""

import json

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.study import Study
from kvpolicies.eval.tasks import TASKS, fingerprint, read_problems

KEYS = ("id", "problem", "answer")


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def one(**changes):
    return {"id": "a", "problem": "1 + 1?", "answer": "2", **changes}


def test_reads_the_first_problems(tmp_path):
    path = write(tmp_path / "p.jsonl", one(), "", one(id="b"), one(id="c"))
    assert [problem.id for problem in read_problems(path, KEYS, 2)] == ["a", "b"]
    assert len(read_problems(path, KEYS, None)) == 3


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([one(), '{"id": "b", '], r"p\.jsonl:2: malformed JSON"),
        ([one(), "", "[1, 2]"], r"p\.jsonl:3: expected a JSON object"),
        ([{"id": "a", "problem": "?"}], r"p\.jsonl:1: key 'answer' is missing"),
        ([one(problem=" ")], r"p\.jsonl:1: 'problem' is empty"),
        ([one(), one()], r"p\.jsonl:2: id 'a' was given before"),
        ([""], "no problems"),
    ],
)
def test_bad_data_names_file_and_line(tmp_path, lines, says):
    with pytest.raises(UserError, match=says) as caught:
        read_problems(write(tmp_path / "p.jsonl", *lines), KEYS, None)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_problems(tmp_path / "none.jsonl", KEYS, None)


def test_binary_file(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read_problems(tmp_path / "p.jsonl", KEYS, None)


def test_fingerprint_tells_problems_apart(tmp_path):
    first = read_problems(write(tmp_path / "a.jsonl", one()), KEYS, None)
    second = read_problems(write(tmp_path / "b.jsonl", one(answer="3")), KEYS, None)
    assert fingerprint(first) == fingerprint(first) != fingerprint(second)


def test_ledger_problems_are_the_same_every_time_and_graded_by_their_own_trace():
    study = Study(problems=3, length=100)
    problems = TASKS["ledger"].load(study)
    assert problems == TASKS["ledger"].load(study)
    for problem in problems:
        grades = TASKS["ledger"].grade(problem, problem.solution)
        assert grades["correct"] == 1
        assert grades["lookups_right"] == grades["lookups"] > 0
    other = TASKS["ledger"].grade(problems[0], problems[1].solution)
    assert other["lookups_right"] < other["lookups"]


def test_every_task_has_measures_and_budgets():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.measures and task.budgets and task.summary


def test_odd_but_valid_json_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    text = '{"id": 1, "problem": "a\u2028b", "answer": 2.5}\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    [problem] = read_problems(path, ("id", "problem", "answer"), None)
    assert (problem.id, problem.text, problem.answer) == ("1", "a\u2028b", "2.5")


@pytest.mark.parametrize(
    "line",
    [
        '{"id": null, "problem": "a", "answer": "b"}',
        '{"id": "a", "problem": ["a"], "answer": "b"}',
        '{"id": "a", "problem": "\\ud800", "answer": "b"}',
        '{"id": "a", "problem": "b", "answer": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_what_is_no_problem_is_refused_in_one_line(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=r"data\.jsonl:1") as error:
        read_problems(path, ("id", "problem", "answer"), None)
    assert "\n" not in str(error.value)
