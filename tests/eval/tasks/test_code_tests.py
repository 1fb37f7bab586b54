"""Answers in code: LiveCodeBench's rows, their tests, and what passes them."""

import base64
import json
import pickle
import zlib

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.sandbox import running as sandbox
from kvpolicies.eval.sandbox import seccomp
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.tasks import code_tests
from kvpolicies.eval.tasks.task import TASKS, read_problems


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def own(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    return str(tmp_path / "mine.yaml")


def packed(tests):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def contest(**changes):
    """A row of livecodebench/code_generation_lite, a program."""
    public = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    private = [{"input": "5 6\n", "output": "11", "testtype": "stdin"}]
    row = {
        "question_id": "q1", "question_title": "Sum", "question_content": "Add two numbers.",
        "starter_code": "", "public_test_cases": json.dumps(public),
        "private_test_cases": packed(private), "metadata": "{}",
    }  # fmt: skip
    return {**row, **changes}


def called():
    """Another, a function."""
    test = {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}
    return contest(
        question_id="q2",
        starter_code="class Solution:\n    def add(self, xs, n):\n        ",
        public_test_cases=json.dumps([test]),
        private_test_cases=packed([test]),
        metadata=json.dumps({"func_name": "add"}),
    )


ADD = (
    "```python\nclass Solution:\n    def add(self, xs, n):\n        return [x + n for x in xs]\n```"
)


def test_answers_in_code(tmp_path):
    task = TASKS["livecodebench"]
    path = write(tmp_path / "code.jsonl", contest(), called())
    program, function = map(task.asked, read_problems(path, task.keys, None, task.columns))
    assert [test.output for test in program.tests] == ["3\n", "11"]
    assert "standard input" in program.text and "def add" in function.text
    try:
        sandbox.check(task.sandbox)
    except UserError as error:
        pytest.skip(str(error))
    right = "```\nprint(sum(map(int, input().split())))\n```"
    assert task.grade(program, right) == {"correct": 1}
    assert task.grade(program, "```\nprint(3)\n```") == {"correct": 0}  # public tests only
    assert task.grade(program, right.strip("`")) == {"correct": 0}  # no block
    assert task.grade(program, right + "\n```\nraise ValueError\n```") == {"correct": 0}
    assert task.grade(function, ADD) == {"correct": 1}
    assert task.grade(function, ADD.replace("x + n", "x")) == {"correct": 0}


def test_code_that_cannot_be_isolated_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(seccomp, "supported", lambda: False)
    data = str(write(tmp_path / "code.jsonl", contest()))
    study = Study(model="smollm2", task="livecodebench", data=data)
    with pytest.raises(UserError, match="cannot be run isolated"):
        study.load()
    text = "base: livecodebench\nsandbox: {isolation: limits}\n"
    said_so = Study(model="smollm2", task=own(tmp_path, text), data=data)
    assert len(said_so.load()) == 1


class Evil:
    """Would run a command where pickles are loaded without care."""

    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("", "key 'tests' is missing|tests"),
        ("[]", "tests must be a list"),
        ("[1]", "each test must be an object"),
        ('[{"input": "1"}]', "each test must be an object"),
        ("no base64!", "neither JSON nor"),
        (base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode(), "neither JSON nor"),
        (base64.b64encode(b"junk").decode(), "neither JSON nor"),
    ],
)
def test_bad_tests_are_one_line(tmp_path, capsys, tests, says):
    task = TASKS["livecodebench"]
    path = write(tmp_path / "code.jsonl", contest(public_test_cases=tests))
    with pytest.raises(UserError, match=rf"code\.jsonl:1.*({says})"):
        read_problems(path, task.keys, None, task.columns)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("wanted", "given", "same"),
    [
        ("3\n", "3", True),
        ("1 2\n3", " 1 2 \n3\n\n", True),
        ("0.5", "0.50", True),
        ("1 2", "1\n2", False),
        ("YES", "yes", False),
        ("1", "1 1", False),
        ("50000000000000000", "50000000000000001", False),
        ("1000", "1_000", False),
        ("1", "\u0661", False),
        ("1e3", "1000", True),
    ],
)
def test_output_of_programs(wanted, given, same):
    assert code_tests.same_output(wanted, given) is same


def test_values_of_functions():
    assert code_tests.same_value("[1, 2.0]", "[1.0, 2]")
    assert not code_tests.same_value("[1, 2]", "[2, 1]")
    assert not code_tests.same_value("1", "")
    assert not code_tests.same_value("[1, {}]", "[true, {}]")
    assert not code_tests.same_value('{"a": 0}', '{"a": false}')
    assert code_tests.same_value('{"a": [true, 2]}', '{"a": [true, 2.0]}')
