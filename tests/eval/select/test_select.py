"""`kvpolicies select` from study folders to deploy.yaml, and what then runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvpolicies.cli import main
from kvpolicies.config import Deployment, load_yaml
from kvpolicies.eval.select import evidence
from kvpolicies.eval.study.config import load_study
from kvpolicies.models import loading
from kvpolicies.models.memory import meta_model, weight_bytes
from tests.support.selecting import GOOD, ones, select
from tests.support.studies import make_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished: rkv loses 2 of 300 problems, random nearly all. Read it, do not write."""
    return make_study(tmp_path_factory.mktemp("made") / "study", GOOD)


def test_what_is_written_runs_under_the_other_commands(study, tmp_path, capsys):
    out = tmp_path / "deploy.yaml"
    status, text = select(capsys, study, "--largest-loss", "0.05", "--memory", "1GB", "--out", out)
    assert status == 0 and "rkv @ 101 wins" in text and "of 300" not in text
    config = load_yaml(Deployment, out)
    assert (config.policy, config.budget, config.batch_size) == ("rkv", "101", 4)
    assert config.model == "embedded" and config.max_new_tokens == 300
    head = out.read_text()
    for part in (str(study), "fingerprint", "commit", "95 % intervals", "memory, predicted"):
        assert part in head
    assert load_study(str(out)).policies == ("rkv",)
    assert main(["bench", str(out), "--predict-only"]) == 0
    assert "rkv" in capsys.readouterr().out
    record = json.loads((tmp_path / "selection.json").read_text())
    assert record["verdict"] == "chosen" and record["winner"] == "rkv @ 101"
    kept = {c["policy"]: c for c in record["candidates"]}
    assert kept["rkv"]["tests"][0]["bound"] > -0.05 > kept["random"]["tests"][0]["bound"]
    assert kept["full"]["memory"]["total"] > kept["rkv"]["memory"]["total"]


def test_a_real_study_of_the_embedded_model_is_deployed(small_study, tmp_path, capsys):
    _, folder = small_study
    out = tmp_path / "deploy.yaml"
    asked = ["--largest-loss", "1", "--model", "embedded", "--concurrency", "2"]
    status, text = select(
        capsys, folder, *asked, "--out", out, load=["--max-tokens", "12"]
    )  # 4 problems prove nothing, and all of accuracy may be lost
    assert status == 0 and "streaming @ 40 wins" in text and "would be cut off" in text
    prompt = "ledger bob 7 ann 3 plan #1 ann #2 bob #3 answer go"
    assert main(["generate", str(out), "--raw", "--json", "--prompt", prompt]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tokens"] <= 12 and made["max_slots"] <= 40


def test_the_data_cannot_tell(tmp_path, capsys):
    few = {"full": ones(24), "rkv @ 101": ones(24), "random @ 101": ones(24, 20)}
    folder, out = make_study(tmp_path / "study", few), tmp_path / "deploy.yaml"
    argv = [folder, "--largest-loss", "0.03", "--memory", "4MB", "--out", out]
    status, text = select(capsys, *argv)
    assert status == 3 and "cannot tell" in text and "problems a task would tell" in text
    assert "Nothing was written" in text and not list(tmp_path.glob("*.*"))
    record = tmp_path / "why.json"
    assert select(capsys, *argv, "--json", record)[0] == 3
    assert json.loads(record.read_text())["verdict"] == "undecided" and not out.exists()
    status, _ = select(capsys, *argv, "--anyway")
    assert status == 0 and "UNDECIDED" in out.read_text()
    assert load_yaml(Deployment, out).policy == "rkv"


def test_nothing_meets_the_constraints(study, tmp_path, capsys):
    out = tmp_path / "deploy.yaml"
    argv = ["--least-accuracy", "0.5", "--anyway", "--out", out]
    status, text = select(capsys, study, *argv, "--memory", "1MB")
    assert status == 4 and "Nothing fits" in text and "more memory, rkv @ 101" in text
    bad = make_study(tmp_path / "bad", {"full": ones(40, 30), "random @ 101": ones(40, 36)})
    status, text = select(capsys, bad, *argv)
    assert status == 4 and "25.0 points short" in text and not out.exists()


def test_samples_of_a_problem_count_as_one(tmp_path, capsys):
    """Eight samples of each of 30 problems prove no more than 30 problems."""
    grades = {"full": ones(30, samples=8), "rkv @ 101": ones(30, samples=8)}
    folder = make_study(tmp_path / "study", grades)
    argv = [folder, "--memory", "5MB", "--largest-loss", "0.05", "--out", tmp_path / "d.yaml"]
    status, text = select(capsys, *argv)
    assert status == 3 and re.search(r"may lose 9[.][456] points", text)  # 1 - 0.05 ** (1 / 30)


def test_studies_of_two_tasks_and_of_one_in_two_folders(study, tmp_path, capsys):
    other = {"full": ones(300), "streaming @ 69": ones(300, 1)}
    same = make_study(tmp_path / "same", other)
    out = tmp_path / "deploy.yaml"
    argv = ["--largest-loss", "0.05", "--out", out, "--force"]
    status, text = select(capsys, study, same, *argv)
    assert status == 0 and "streaming @ 69 wins" in text  # both folders' policies meet
    worse = {"full": ones(200), "rkv @ 101": ones(200, 40), "beacon @ 101": ones(200)}
    apart = make_study(tmp_path / "apart", worse, name="q")
    status, text = select(capsys, study, apart, *argv)
    assert status == 0 and "full wins" in text  # rkv fails on the second task
    assert "ledger 2: may lose" in text and "no candidate: random @ 101 was not measured" in text


def test_the_files_of_several_processes_are_one_study(tmp_path):
    grades = {"full": ones(12), "rkv @ 101": ones(12, 7)}
    whole, split = (make_study(tmp_path / name, grades) for name in ("whole", "split"))
    lines = (split / "results.jsonl").read_text().splitlines(keepends=True)
    (split / "results.0001.jsonl").write_text("".join(lines[5:]))
    (split / "results.jsonl").write_text("".join(lines[4::-1]))
    one, other = (evidence.read([str(folder)], None).benches[0] for folder in (whole, split))
    assert one.problems == other.problems and list(one.cells) == list(other.cells)
    for cell in one.cells:
        np.testing.assert_array_equal(one.cells[cell].correct, other.cells[cell].correct)


def test_a_ratio_is_deployed_as_slots_of_the_deployments_length(tmp_path, capsys):
    grades = {"full": ones(200), "rkv @ 25%": ones(200)}
    folder, out = make_study(tmp_path / "study", grades), tmp_path / "deploy.yaml"
    load = ["--batch", "2", "--max-tokens", "740", "--prompt-tokens", "100"]
    status, text = select(capsys, folder, "--largest-loss", "0.05", "--out", out, load=load)
    assert status == 0 and load_yaml(Deployment, out).budget == "210"
    assert "25% of 100 + 740 tokens" in out.read_text()
    for said in ("740 new tokens are to be deployed", "is 210 as deployed", "none longer than 60"):
        assert f"{said}" in text


def test_a_budget_that_was_never_filled_is_said(tmp_path, capsys):
    grades = {"full": ones(200), "rkv @ 380": ones(200)}
    folder = make_study(tmp_path / "study", grades)
    argv = [folder, "--largest-loss", "0.05", "--out", tmp_path / "deploy.yaml"]
    load = ["--batch", "2", "--max-tokens", "300", "--prompt-tokens", "700"]
    assert (
        "100 % of rkv @ 380's samples on ledger never filled" in select(capsys, *argv, load=load)[1]
    )


def test_oracle_is_no_candidate(tmp_path, capsys):
    folder = make_study(tmp_path / "study", {"full": ones(200), "oracle @ 101": ones(200)})
    argv = [folder, "--largest-loss", "0.05", "--out", tmp_path / "deploy.yaml"]
    status, text = select(capsys, *argv)
    assert status == 0 and "full wins" in text and "oracle @ 101 is told what is to come" in text


def cut(folder: Path) -> None:
    path = folder / "results.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    gone = [row for row in rows if '"rkv"' in row and '"p7"' in row]
    path.write_text("".join(row for row in rows if row not in gone))


def changed(key: str, value: object, *, inside: str = "study"):
    def change(folder: Path) -> None:
        record = json.loads((folder / "run.json").read_text())
        (record[inside] if inside else record)[key] = value
        (folder / "run.json").write_text(json.dumps(record))

    return change


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut, "unfinished: rkv @ 101 lacks p7"),
        (changed("problems", 31, inside=""), "1 of 31 problems not reached by any"),
        (changed("model", "smollm2"), "measured smollm2, not --model embedded"),
        (changed("charge_state", True), "charge_state"),
        (changed("task", "fidelity"), "grades no answers"),
        (changed("task", "nosuch"), "nosuch"),
        (changed("policies", ["nosuch"]), "nosuch"),
        (changed("new", 1), "unknown key 'new'"),
        (changed("model", {}, inside=""), "not the record of a study"),
        (changed("problems", "x", inside=""), "not the record of a study (its 'problems')"),
        (changed("problems", 0, inside=""), "whole number"),
        (changed("environments", [7], inside=""), "its 'environments'"),
        (lambda f: (f / "run.json").write_text("{"), "run.json: malformed JSON"),
        (lambda f: (f / "run.json").write_bytes(b"\xff"), "run.json: not UTF-8 text"),
        (lambda f: (f / "run.json").write_text("[" * 9999), "run.json: malformed JSON"),
        (lambda f: (f / "run.json").write_text("[]"), "not the record of a study"),
        (lambda f: (f / "run.json").write_text('{"bench": 1}'), "measures no accuracy"),
        (lambda f: (f / "run.json").unlink(), "holds no run.json"),
        (lambda f: (f / "results.jsonl").unlink(), "no results.jsonl"),
        (lambda f: (f / "results.jsonl").write_text(""), "30 of 30 problems not reached"),
        (lambda f: (f / "results.jsonl").write_text("x\n"), "nowhere: results.jsonl:1 (no JSON)"),
    ],
)
def test_a_folder_that_holds_no_finished_study_is_refused(spoil, says, tmp_path, capsys):
    folder = make_study(tmp_path / "study", {"full": ones(30), "rkv @ 101": ones(30)})
    spoil(folder)
    argv = [folder, "--model", "embedded", "--largest-loss", "0.5", "--out", tmp_path / "d.yaml"]
    status, text = select(capsys, *argv)
    assert status == 2 and says in text and not (tmp_path / "d.yaml").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "bfloat16", "name": "q"}, "differ in dtype"),
        ({"weights": "f" * 16, "name": "q"}, "other weights"),
        ({"seed": 3}, "under other conditions (seed)"),
    ],
)
def test_folders_that_do_not_go_together_are_refused(options, says, study, tmp_path, capsys):
    other = make_study(tmp_path / "other", {"full": ones(300), "rkv @ 69": ones(300)}, **options)
    argv = [study, other, "--largest-loss", "0.05", "--out", tmp_path / "d.yaml"]
    status, text = select(capsys, *argv)
    assert status == 2 and says in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--largest-loss", "3"], "lie in [0, 1], got 3.0"),
        (["--least-accuracy", "nan"], "expected a number"),
        (["--memory", "much"], "expected a size"),
        ([], "give a constraint"),
        (["--memory", "1GB", "--concurrency", "4"], "--batch or --concurrency"),
        (["--memory", "1GB", "--out", "no/such/d.yaml"], "no such folder"),
        (["--memory", "1GB", "--out", "."], "is a folder"),
        (["--memory", "1GB", "--out", "x.json", "--json", "x.json"], "is --out too"),
        (["--memory", "1GB", "--prompt-tokens", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, says, study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, text = select(capsys, study, *options)
    assert status == 2 and says in text and not list(tmp_path.iterdir())


def test_bench_takes_a_deployment_file_and_refuses_what_it_cannot_run(tmp_path, capsys):
    file = tmp_path / "deploy.yaml"
    file.write_text("policy: rkv\nbudget: 64\nbatch_size: 3\nmax_new_tokens: 90\n")
    assert main(["bench", str(file), "--predict-only", "--policies", "full,streaming"]) == 0
    shown = capsys.readouterr().out
    assert "streaming" in shown and "64" in shown and "rkv" not in shown
    file.write_text("policy: rkv\nbudget: 64\nkernels: torch\n")
    assert main(["bench", str(file), "--predict-only"]) == 2
    assert "takes no 'kernels'" in capsys.readouterr().err


def test_a_config_without_weights_has_the_models_size():
    model, _ = loading.load("embedded")
    bare = meta_model(loading.load_config("embedded"), model.dtype)
    assert weight_bytes(bare) == weight_bytes(model)
    with pytest.raises(ValueError, match="no such folder"):
        loading.load_config("./nosuch")
