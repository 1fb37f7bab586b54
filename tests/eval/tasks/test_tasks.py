"""Tasks: their files, reading problems, what bad data says, grading."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicies.errors import Caution, UserError
from kvpolicies.eval.study import run
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, read_rows
from kvpolicies.eval.tasks import grading
from kvpolicies.eval.tasks.task import TASKS, Problem, find_task, fingerprint, read_problems
from kvpolicies.models import embedded

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
    with pytest.raises(UserError, match="no such file"):
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
    problems = TASKS["ledger"].load(3, 100, None)
    assert problems == TASKS["ledger"].load(3, 100, None)
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


def own(tmp_path, text, name="mine.yaml"):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_a_task_of_ones_own_is_a_few_lines(tmp_path):
    path = own(tmp_path, "base: math500\nsummary: mine\nprompt: 'Solve: {{ problem }}'\n")
    data = write(tmp_path / "p.jsonl", one())
    study = Study(model="smollm2", task=path, data=str(data)).resolved()
    assert (study.entry.name, study.budgets) == ("mine", ("256", "512", "1024"))
    [problem] = study.load()
    assert problem.text == "Solve: 1 + 1?"
    assert study.entry.grade(problem, r"\boxed{2}") == {"correct": 1}
    again = Study(model="smollm2", task="math500", data=str(data)).resolved()
    assert fingerprint([problem]) != fingerprint(again.load()), "another prompt"


def test_how_it_is_graded_belongs_to_the_fingerprint(tmp_path):
    data = write(tmp_path / "p.jsonl", one())
    marks = set()
    for more in ("", "extract: [last_number]\n", "extract: [boxed, last_number]\n"):
        study = Study(task=own(tmp_path, f"max_new_tokens: 9\n{more}"), data=str(data))
        marks.add(fingerprint(study.load()))
    assert len(marks) == 3


def test_a_tasks_own_expression_finds_the_answer(tmp_path, monkeypatch):
    task = find_task(own(tmp_path, "max_new_tokens: 9\nextract: 'Result, all told: (-?[0-9,]+)'\n"))
    assert task.ways == ("Result, all told: (-?[0-9,]+)",)
    problem = Problem("p", "?", "12")
    says = [r"Result, all told: 3. Result, all told: 12", r"\boxed{12}", "Result, all told: x"]
    assert [task.grade(problem, text)["correct"] for text in says] == [1, 0, 0]
    both = replace(task, extract=("boxed", "(?:is|are) ([0-9]+)"))
    assert both.grade(problem, "they are 12") == both.grade(problem, r"\boxed{12}")
    monkeypatch.setattr(grading, "SECONDS", 0.01)
    with pytest.warns(Caution, match=r"took more than 0\.01 s on a text of 5001 characters"):
        assert replace(task, extract=("(x+x+)+y",)).grade(problem, "x" * 5000 + ".")["correct"] == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("promt: x", "unknown key 'promt': did you mean 'prompt'"),
        ("columns: {probem: x}", "columns: unknown key 'probem': did you mean 'problem'"),
        ("hub: {name: x}", "hub: unknown key 'name'"),
        ("hub: openai/gsm8k", "hub: expected keys and values"),
        ("hub: {id: a, files: [a.txt]}", "files must all be of one kind"),
        ("grader: maths", "did you mean 'math'"),
        ("extract: [box]", "did you mean 'boxed'.* or a regular expression with one group"),
        ("extract: ['(a', boxed]", "extract '.a': no regular expression .missing"),
        ("extract: ['answer (is )?(.*)']", "2 groups; a regular expression needs one"),
        ("grader: code\nextract: [boxed]", "leave extract out"),
        ("prompt: '{{ problm }}'", "unknown 'problm': did you mean 'problem'"),
        ("prompt: '{% if %}'", "no valid template"),
        ("max_new_tokens: many", "expected a whole number"),
        ("problems: 0\nmax_new_tokens: 9", "problems must be at least 1"),
        ("summary: no limit", "max_new_tokens is missing"),
        ("chance: 2\nmax_new_tokens: 9", "chance"),
        ("sandbox: {secs: 1}", "sandbox: unknown key 'secs'"),
        ("sandbox: {isolation: no}", "isolation"),
        ("base: math50", "did you mean 'math500'"),
        ("base: mine.yaml", "base leads back to itself"),
        ("budgets: []\nmax_new_tokens: 9", "budgets: empty"),
        ("- a", "expected keys and values"),
        ("a: [", "no valid YAML"),
        ("grader: 1", "grader must be one of"),
        ("columns: 3", "columns: expected keys and values"),
    ],
)
def test_a_faulty_task_file_is_one_line(tmp_path, text, says):
    with pytest.raises(UserError, match=says) as caught:
        Study(task=own(tmp_path, text))
    assert "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gsm8", "none.yaml", "folder.yaml", ""])
def test_no_such_task(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UserError) as caught:
        Study(task=name)
    assert "\n" not in str(caught.value)


def rows_of(name):
    """Two rows of each shipped set, with the columns of the real one."""
    return {
        "gsm8k": [{"question": f"{n} + 1?", "answer": f"think\n#### {n + 1}"} for n in (1, 2)],
        "hmmt": [
            {"problem_idx": n, "problem": "?", "answer": rf"\frac{{{n}}}{{7}}",
             "problem_type": ["Algebra"]} for n in (1, 2)
        ],
        "gpqa-diamond": [
            {"Record ID": f"rec{n}", "Question": f"Which {n}?", "Correct Answer": "yes",
             **{f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}} for n in (1, 2)
        ],
        "math500": [
            {"problem": "?", "solution": "s", "answer": str(n), "subject": "Algebra", "level": 1,
             "unique_id": f"test/{n}.json"} for n in (1, 2)
        ],
        "aime25": [{"problem": "?", "answer": str(n), "id": str(n)} for n in (0, 1)],
    }[name]  # fmt: skip


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """What `datasets` prepares goes to the test's own folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return datasets


@pytest.mark.parametrize("name", ["gsm8k", "hmmt", "gpqa-diamond", "math500", "aime25"])
def test_rows_as_the_hub_has_them(caches, tmp_path, name):
    """A local folder of parquet stands for the hub; our own columns do the rest."""
    folder = tmp_path / "set"
    folder.mkdir()
    split = TASKS[name].hub.split
    table = caches.Dataset.from_list(rows_of(name))
    table.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    text = f"base: {name}\nhub: {{id: {folder}, subset: '', revision: ''}}\n"
    study = Study(model="smollm2", task=own(tmp_path, text)).resolved()
    first, second = study.load()
    assert first.id != second.id
    answers = {"gsm8k": "2", "hmmt": "1/7", "math500": "1", "aime25": "000"}
    right = rf"\boxed{{{answers.get(name, first.answer)}}}"
    assert study.entry.grade(first, right) == {"correct": 1}
    assert study.entry.grade(first, "") == {"correct": 0}


def test_a_set_that_is_not_there_is_one_line(caches, tmp_path, monkeypatch):
    text = f"base: gsm8k\nhub: {{id: {tmp_path / 'none'}}}\n"
    study = Study(model="smollm2", task=own(tmp_path, text)).resolved()
    with pytest.raises(UserError, match=r"cannot be read from the hub.*data: FILE") as caught:
        study.load()
    assert "\n" not in str(caught.value)


def test_without_the_package_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    study = Study(model="smollm2", task="gsm8k").resolved()
    with pytest.raises(UserError, match=r"kvpolicies\[hub\].*data: FILE"):
        study.load()


def test_a_study_of_a_task_file_runs_and_does_not_resume_under_another(tmp_path):
    """The embedded model's folder, as any local model: its answers are wrong, and graded."""
    text = "summary: mine\nmax_new_tokens: 3\nextract: [last_number]\nbudgets: [40]\n"
    path = own(tmp_path, text)
    data = write(tmp_path / "p.jsonl", one(problem="1"), one(id="b", problem="2"))
    study = Study(
        model=str(Path(embedded.__file__).parent / "assets" / "ledger"), task=path,
        data=str(data), policies=("random",), out=str(tmp_path / "out"),
    )  # fmt: skip
    rows = read_rows(run.run_study(study) / NAME)
    assert len(rows) == 4 and all(row["correct"] in (0, 1) for row in rows)
    own(tmp_path, text + "prompt: 'Please: {{ problem }}'\n")
    with pytest.raises(UserError, match="holds another study; different: the problems"):
        run.run_study(replace(study))
