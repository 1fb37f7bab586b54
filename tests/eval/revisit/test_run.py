"""`kvpolicies revisit` as a command: its folder, resuming, sources, refusals in one line."""

import csv
import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvpolicies.budget import BudgetSpec
from kvpolicies.cli import main
from kvpolicies.eval.revisit import page, summary
from kvpolicies.eval.revisit.config import Revisit
from kvpolicies.eval.revisit.run import run
from kvpolicies.eval.revisit.traces import find
from kvpolicies.layer_shares import shares_of

OPTIONS = {
    "length": "70", "problems": "3", "batch-size": "2", "policies": "streaming,full",
    "budgets": "30,1000", "distance": "300", "scale-below": "1000",
}  # fmt: skip


def command(out: Path, **more: str) -> list[str]:
    options = {**OPTIONS, **{k.replace("_", "-"): v for k, v in more.items()}, "out": str(out)}
    return ["revisit", *(part for k, v in options.items() for part in (f"--{k}", v))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("revisit") / "out"
    assert main(command(out)) == 0
    return out


def test_the_folder_holds_everything(folder):
    pictures = ("distances", "heads", "queries", "losses")
    names = {f"{name}{dark}.png" for name in pictures for dark in ("", "-dark")}
    names |= {f"{name}.csv" for name in ("losses", "heads", "distances", "tokens", "queries")}
    names |= {"results.jsonl", "run.json", "revisit.json", "revisit.html", "claims.lock"}
    assert {path.name for path in folder.iterdir()} == names
    found = json.loads((folder / "revisit.json").read_text())
    assert [trace["id"] for trace in found["traces"]] == ["ledger-0", "ledger-1", "ledger-2"]
    assert [(x["policy"], x["budget"]) for x in found["losses"]] == [
        ("streaming", "30"), ("streaming", "1000"),
    ]  # fmt: skip
    small, large = found["losses"]
    assert 0 < small["mass"]["low"] <= small["mass"]["value"] <= small["mass"]["high"] <= 1
    assert all(large[key] == {"value": 0, "low": 0, "high": 0} for key in ("revisits", "all"))
    assert "asked: 150 and 300; scaled below 1000" in found["sentences"][0]
    with (folder / "losses.csv").open() as file:
        line = next(csv.DictReader(file))
    assert float(line["mass_value"]) == small["mass"]["value"] and line["policy"] == "streaming"
    with (folder / "heads.csv").open() as file:
        lines = list(csv.DictReader(file))
    shape = found["heads"]["top-k"]
    assert len(lines) == len(shape) * len(shape[0])
    assert float(lines[-1]["global_top-k"]) == shape[-1][-1]


def test_shares_and_distances_add_up(folder):
    found = json.loads((folder / "revisit.json").read_text())
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for name in ("local", "global"):
        assert sum(found["distances"][name]) == pytest.approx(1.0, abs=1e-5)
    assert 0 < found["share_global"]["top-k"]["value"] < 1
    every = len(rows[0]["layers"]) * len(rows[0]["global"]["top-k"][0])
    assert found["totals"]["all"] == pytest.approx(
        sum(row["queries"] for row in rows) * every, rel=1e-5
    )


class Links(HTMLParser):
    """What a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str | None] = []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "iframe"), tag
        self.found += [v for k, v in attrs if k in ("src", "href", "srcset", "action", "data")]


def test_the_page_loads_nothing_and_shows_the_text(folder):
    text = (folder / page.NAME).read_text()
    links = Links()
    links.feed(text)
    assert len(links.found) == 8
    assert all(link and link.startswith("data:image/png;base64,") for link in links.found)
    assert (
        "prefers-color-scheme: dark" in text and ">ledger-0 (" in text and " ledger</span>" in text
    )


def test_tokens_of_others_are_text_on_the_page(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    rows[0]["pieces"][3] = "<script>alert(1)</script>"
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    config, _ = find(Revisit(length=70, problems=3).resolved())
    page.write(tmp_path, config, rows)
    Links().feed((tmp_path / page.NAME).read_text())


def test_a_killed_run_goes_on_to_the_same_numbers(folder, tmp_path, monkeypatch):
    whole = (folder / "results.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for name in ("run.json",):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "results.jsonl").write_bytes(whole[: first + 100])
    assert main(command(tmp_path)) == 0
    assert (tmp_path / "results.jsonl").read_bytes() == whole
    for name in ("revisit.json", "tokens.csv", "queries.csv", "losses.png"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    # Nothing is left to do: nothing is decoded again.
    monkeypatch.setattr("kvpolicies.eval.revisit.evictions.decode", None)
    assert main(command(tmp_path)) == 0


@pytest.mark.parametrize(
    "change",
    [{"id": []}, {"cells": [{"policy": 3}]}, {"totals": 3}, {"histogram": "x"}, {"sum": 3}],
)
def test_a_row_that_is_not_as_it_was_written(folder, tmp_path, change, capsys):
    shutil.copytree(folder, tmp_path / "again")
    first, *others = (folder / "results.jsonl").read_text().splitlines()
    spoilt = json.dumps({**json.loads(first), **change})
    (tmp_path / "again" / "results.jsonl").write_text("\n".join([spoilt, *others]) + "\n")
    assert main(command(tmp_path / "again")) == 2
    assert "results.jsonl:1: not a row as an analysis wrote it" in capsys.readouterr().err


def test_what_full_wrote_in_a_study_is_a_source(small_study, tmp_path):
    _, study = small_study
    options = {"traces": str(study), "policies": ("full",), "problems": 1, "skip": 2}
    config, rows = run(Revisit(**options, out=str(tmp_path / "out")))
    wrote = [json.loads(line) for line in (study / "results.jsonl").read_text().splitlines()]
    # Rows are in the order in which they were done; a source has its problems' order.
    third = next(x for x in wrote if (x["policy"], x["problem"]) == ("full", "ledger-2"))
    assert config.model == "embedded" and [row["id"] for row in rows] == [third["problem"]]
    assert rows[0]["queries"] == len(third["tokens"]) - 1 and rows[0]["cells"] == []
    text = "".join(rows[0]["pieces"]).split()
    assert text[rows[0]["prompt_tokens"] :] == third["text"].split()[: rows[0]["queries"]]
    with pytest.raises(ValueError, match="asked with wrapper '', not 'a "):
        find(Revisit(**options, wrapper="a {prompt}"))
    found = page.write(tmp_path / "out", config, rows)
    assert found["losses"] == [] and summary.losses_table(found)[1] == []


def test_a_profile_is_a_file_for_layers(tmp_path, capsys, folder):
    file, out = tmp_path / "shares.yaml", tmp_path / "out"
    assert main(command(out, policies="full", profile=str(file))) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    shares = [float(x) for x in shares_of(str(file), 4)]
    queries = sum(row["queries"] for row in rows)
    for layer, share in enumerate(shares):
        whole = sum(row["needs"][layer] * row["queries"] for row in rows)
        assert share == pytest.approx(whole / queries, rel=1e-5)
    totals = [b.total for b in BudgetSpec(f"133:{file}").of(None).by_layer(4)]
    assert sum(totals) == 4 * 133
    ordered = sorted(range(4), key=lambda i: shares[i])
    assert [totals[i] for i in ordered] == sorted(totals)
    # What was analysed without counting is not gone on with.
    shutil.copytree(folder, tmp_path / "uncounted")
    assert main(command(tmp_path / "uncounted", profile=str(file))) == 2
    assert "profile ( -> counted)" in capsys.readouterr().err


def test_worked_solutions_are_a_source(tmp_path):
    from kvpolicies.models import embedded

    model, tokenizer = embedded.load()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [
        {"id": f"p{i}", "problem": "ledger bob 7 go", "solution": "step #1 ann 3 + 0 -> 3 .4"}
        for i in range(3)
    ]
    data = tmp_path / "solutions.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = Revisit(
        model=str(tmp_path / "model"), traces=str(data), policies=("full",), skip=1,
        max_new_tokens=6, out=str(tmp_path / "out"),
    )  # fmt: skip
    _, rows = run(config)
    assert [row["id"] for row in rows] == ["p1", "p2"] and rows[0]["queries"] == 5
    assert rows[0]["prompt_tokens"] == 4  # as it is written
    wrapped = replace(config, wrapper="ledger {prompt} go", out=str(tmp_path / "wrapped"))
    assert run(wrapped)[1][0]["prompt_tokens"] == 6
    told = json.loads((tmp_path / "wrapped" / "run.json").read_text())["prompts"]
    assert told["form"]["wrapper"] == "ledger {prompt} go" and told["unknown"] == 0
    with pytest.raises(ValueError, match=r"all passed over by skip 9"):
        run(replace(config, skip=9, out=str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ({"policies": "bacon"}, "bacon"),
        ({"budgets": "8,abc"}, "'abc'"),
        ({"budgets": "0"}, "leaves no slot"),
        ({"k": "0"}, "k must be at least 1"),
        ({"distance": "-5"}, "distance must be above 0"),
        ({"distance": "nan"}, "expected a number"),
        ({"definition": "topk"}, "did you mean 'top-k'"),
        ({"head": "3"}, "LAYER.HEAD"),
        ({"head": "99.0"}, "no query head 99.0"),
        ({"problems": "0"}, "problems must be at least 1"),
        ({"seed": "-1"}, "seed must be at least 0"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"traces": "absent.jsonl"}, "name another with --model"),
        ({"traces": "absent.jsonl", "model": "smollm2"}, "absent.jsonl: no such file"),
        ({"traces": "results.jsonl"}, "no study's folder"),
        ({"model": "./nowhere"}, "no such folder"),
        ({"length": "901"}, "it must be 50 to 900"),
        ({"max_new_tokens": "1"}, "at least 2"),
        ({"budgets": "1%"}, "budget 1% of trace 'ledger-0'"),
    ],
)
def test_refusals(more, hint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command(tmp_path / "out", **more)) == 2
    captured = capsys.readouterr()
    assert hint in captured.err and len(captured.err.splitlines()) == 1 and not captured.out
    assert not (tmp_path / "out").exists()


def test_folders_of_others_are_left_alone(folder, small_study, tmp_path, capsys):
    for out, more, hint in (
        (folder, {"k": "149"}, "different: k (150 -> 149)"),
        (small_study[1], {}, "holds another study"),
    ):
        before = {path: path.read_bytes() for path in out.iterdir()}
        assert main(command(out, **more)) == 2
        assert hint in capsys.readouterr().err
        assert {path: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    (tmp_path / "results.jsonl").write_text('{"id": 1}\n')
    assert main(command(tmp_path)) == 2
    assert "results.jsonl:1: not a row as an analysis wrote it" in capsys.readouterr().err


def test_a_study_is_not_read_under_another_model(small_study, tmp_path, capsys):
    more = {"traces": str(small_study[1]), "model": "smollm2"}
    assert main(command(tmp_path / "out", **more)) == 2
    assert "written by model embedded, not by smollm2" in capsys.readouterr().err


def test_a_yaml_file_gives_the_options(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("problems: 1\nbudgit: [30]\n")
    assert main(["revisit", str(path)]) == 2
    assert "did you mean 'budgets'" in capsys.readouterr().err
