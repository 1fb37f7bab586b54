"""The command: one line and status 2 for bad input, and nothing written then."""

import json
import weakref

import pytest

from kvpolicies.cli import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policies", "beacn"], "did you mean 'beacon'"),
        (["--policies", "beacon(n_beacn=3)"], "unknown option 'n_beacn'"),
        (["--budgets", "3"], "leaves no slot"),
        (["--budgets", "0"], "budget"),
        (["--budgets", "-5"], "budget"),
        (["--task", "gsm8k", "--model", "m", "--data", "nowhere.jsonl"], "no such file"),
        (["--task", "gsm8k"], "knows the ledger's words only"),
        (["--model", "nowhere.gguf"], "no such file"),
        (["nowhere.yaml"], "no such file"),
        (["--problems", "many"], "whole number"),
        (["--length", "3"], "length is 3"),
        (["--frobnicate"], "unrecognized arguments"),
        (["--seed", "-1"], "seed must be >= 0"),
        (["--out", "/dev/null/x"], "is a file"),
        (["--out", "x" * 5000], "cannot be made"),
        (["--temperature", "inf"], "temperature must be"),
        (["--device", "meta"], "expected auto, cpu"),
        (["--device", "tpu"], "expected auto, cpu"),
        (["--budgets", ""], "budgets: empty"),
        (["--policies", " "], "--policies: empty"),
        (["--policies", "rkv(mix='a')"], "finite number"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1 and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_malformed_data_names_the_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": "a", "problem": "?", "answer": "1"}\n{"id"\n')
    assert main(["compare", "--task", "gsm8k", "--model", "m", "--data", "data.jsonl"]) == 2
    assert "data.jsonl:2: malformed JSON" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_a_model_of_an_unsupported_architecture(tmp_path, monkeypatch, capsys):
    """An encoder-decoder is refused by name, before anything is written."""
    from kvpolicies.eval.tasks import ledger
    from kvpolicies.models import loading

    class Config:
        model_type, is_encoder_decoder = "t5", True

        def get_text_config(self, decoder):
            return self

    class T5(dict):
        config = Config()
        generation_config = None

        def modules(self):
            return []

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load", lambda *_: (T5(), ledger.build_tokenizer()))
    assert main(["compare"]) == 2
    assert "t5" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_table_and_says_where_the_report_is(tmp_path, capsys):
    study = tmp_path / "study.yaml"
    study.write_text("policies: [random]\nbudgets: [30]\nproblems: 2\nlength: 60\n")
    out = tmp_path / "out"
    assert main(["compare", str(study), "--policies", "streaming", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "streaming" in printed and "random" not in printed
    assert str(out / "report.html") in printed.replace("\n", "")
    assert json.loads((out / "run.json").read_text())["study"]["policies"] == ["streaming"]


def test_options_win_over_a_file_that_is_only_valid_with_them(tmp_path, capsys):
    study, out = tmp_path / "study.yaml", tmp_path / "out"
    study.write_text("policies: [random]\nbudgets: [30]\nproblems: 1\nlength: 60\nsamples: 2\n")
    command = ["compare", str(study), "--out", str(out)]
    assert main(command) == 2 and "set a temperature" in capsys.readouterr().err
    assert main([*command, "--temperature", "0.6", "--seed", str(2**53 + 1)]) == 0
    asked = json.loads((out / "run.json").read_text())["study"]
    assert (asked["samples"], asked["temperature"], asked["seed"]) == (2, 0.6, 2**53 + 1)


def test_help_has_an_example(capsys):
    assert main(["compare", "--help"]) == 0
    assert "kvpolicies compare gsm8k --model smollm2" in capsys.readouterr().out


def test_several_studies_run_in_turn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, length in (("near", 60), ("far", 80)):
        (tmp_path / f"{name}.yaml").write_text(
            f"policies: [random]\nbudgets: [30]\nproblems: 2\nlength: {length}\nout: r/{name}\n"
        )
    assert main(["compare", "near.yaml", "far.yaml", "--problems", "1", "--out", "all"]) == 0
    out = capsys.readouterr().out
    for name in ("near", "far"):
        rows = (tmp_path / "all" / name / "results.jsonl").read_text().splitlines()
        assert len(rows) == 2 and f"all/{name}/report.html" in out
    assert not (tmp_path / "r").exists()


def test_of_several_studies_the_last_is_checked_before_the_first_runs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("policies: [random]\nbudgets: [30]\nout: one\n")
    (tmp_path / "bad.yaml").write_text("task: gsm8k\nmodel: m\ndata: nowhere.jsonl\nout: two\n")
    (tmp_path / "same.yaml").write_text("policies: [random]\nbudgets: [40]\nout: ./one\n")
    (tmp_path / "share.yaml").write_text("policies: [random]\nbudgets: ['1%']\nout: two\n")
    (tmp_path / "typo.yaml").write_text("policies: [beacn]\nbudgets: [30]\nout: two\n")
    for other, says in (
        ("bad.yaml", "nowhere.jsonl"),
        ("same.yaml", "give each its own"),
        ("share.yaml", "share.yaml: budget 1% of problem"),
        ("typo.yaml", "typo.yaml: "),
    ):
        assert main(["compare", "good.yaml", other]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("kvpolicies: ") == 1 and error.count("\n") <= 2
        assert not (tmp_path / "one").exists()


def test_studies_of_one_model_load_it_once_and_never_hold_two(monkeypatch):
    """Models are large: the one before is given back before another is loaded."""
    from kvpolicies.eval.study import launch
    from kvpolicies.eval.study.config import Study
    from kvpolicies.eval.study.preparing import SharedModel
    from kvpolicies.models import loading

    class Model:
        pass

    alive, loaded = weakref.WeakSet(), []

    def load(name, *_):
        assert not alive
        loaded.append(name)
        alive.add(model := Model())
        return model, None

    monkeypatch.setattr(loading, "load", load)
    kept, alone = SharedModel(), launch.Group(1, launch.ProcessRank())
    one, other = Study(model="embedded"), Study(model="smollm2")
    for study in (one, one, other, one):
        kept.load(study, "cpu", alone)
    assert loaded == ["embedded", "smollm2", "embedded"]
