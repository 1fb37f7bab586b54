"""Ablations: what is refused before anything trains, and one from its recipe to its table."""

import csv
import json
from pathlib import Path

import pytest
import yaml

from kvpolicies.cli import main
from kvpolicies.train.ablation import load_ablation, shipped

SMALL = {
    "kind": "kvpop_mlp", "hidden": 8, "sequence": 160, "budget": 40, "delay": 8, "min_future": 8,
    "batch": 1, "held_out": 1, "warmup": 1, "steps": 2, "device": "cpu", "log_every": 1,
}  # fmt: skip
TWO = {"boundary": {}, "regression": {"boundary": 0, "regression": 1}}


def written(folder: Path, **changes: object) -> Path:
    """An ablation of two variants, whose results go beside it."""
    given = {
        "recipe": SMALL,
        "variants": TWO,
        "study": {"problems": 1, "budgets": [40]},
        "out": str(folder / "out"),
        **changes,
    }
    path = folder / "losses.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in given.items() if v is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"variant": TWO}, "unknown key 'variant': did you mean 'variants'?"),
        ({"variants": None}, "at least two variants to compare, got 0"),
        ({"variants": {"one": {}}}, "at least two variants to compare, got 1"),
        ({"variants": ["a", "b"]}, "variants: expected keys and values, got list"),
        ({"variants": {"a": {}, "b": {"tow": 1}}}, "b: unknown key 'tow'"),
        ({"variants": {"a": {}, "b": 3}}, "b: expected keys and values, got int"),
        ({"variants": {"a": {}, "b": {}}}, "a and b are the same recipe"),
        ({"variants": {"a": {}, "../b": {"power": 2}}}, "a variant's name is letters"),
        ({"variants": {"a": {}, "b": {"out": "x"}}}, "b: out is not this variant's own to set"),
        ({"variants": {"a": {}, "b": {"model": "smollm2"}}}, "must be of one model"),
        ({"variants": {"a": {}, "b": {"recipe": "distill"}}}, "needs recipe frozen, got distill"),
        ({"variants": {"a": {}, "b": {"window": 9}}}, "needs window None, got 9"),
        ({"variants": {"a": {}, "b": {"data": "ledgr"}}}, "did you mean 'ledger'?"),
        ({"base": "ledger-kvpopp"}, "did you mean 'ledger-kvpop"),
        ({"study": {"budgets": ["25%"]}}, "budgets must be numbers of slots"),
        ({"study": {"budgets": [24]}}, "at the study's budgets: delay 8 is larger than"),
        ({"study": {"policies": ["random"]}}, "policies follows from the variants"),
        ({"study": {"problms": 3}}, "study: unknown key 'problms'"),
        ({"study": 3}, "study: expected keys and values, got int"),
    ],
)
def test_bad_ablations_are_refused_in_one_line(changes, hint, tmp_path, capsys):
    assert main(["ablate", str(written(tmp_path, **changes))]) == 2
    error = capsys.readouterr().err
    assert hint in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_one_names_the_nearest(capsys):
    assert main(["ablate", "dealy"]) == 2
    assert "did you mean 'delay'?" in capsys.readouterr().err


def test_the_packages_ablations_are_whole_and_share_runs_of_one_name():
    wanted = {"delay", "memory", "loss", "lse", "aggregate"}
    assert wanted <= set(shipped())
    runs: dict[str, dict] = {}
    for name in shipped():
        ablation = load_ablation(name, {})
        for label, recipe in ablation.variants.items():
            assert recipe.identity() == runs.setdefault(label, recipe.identity()), label
            assert Path(recipe.out) == Path("results/ablations/runs", label)
    assert load_ablation("lse", {"steps": "3"}).first.steps == 3


@pytest.mark.timeout(240)
def test_from_recipe_to_table(tmp_path, capsys):
    pytest.importorskip("lightning")
    three = TWO | {"squares": {"power": 2}}
    study = {"problems": 1, "length": 60, "budgets": [40]}
    path = written(tmp_path, variants=three, study=study)
    assert main(["ablate", str(path)]) == 0
    out = tmp_path / "out"
    table = list(csv.DictReader((out / "compare" / "losses" / "ablation.csv").open()))
    assert [(x["variant"], x["slots"]) for x in table] == [(name, "40") for name in three]
    # Taken at the recipe's own budget, the figures are those that training ended with.
    for line in table:
        known = json.loads((out / "runs" / line["variant"] / "run.json").read_text())["figures"]
        assert float(line["recall"]) == pytest.approx(known["recall"], abs=6e-4)
        assert float(line["decisions right"]) == pytest.approx(known["accuracy"], abs=6e-4)
        one_target = line["variant"] != "squares"
        assert (line["recall of the first's"] == line["recall"]) == one_target
        assert "(" in line["exact answers %"]
    shown = capsys.readouterr().out
    assert "squares" in shown and "recall" in shown
    assert main(["ablate", str(path), "--steps", "3"]) == 2
    assert "holds another run; different: steps (2 -> 3)" in capsys.readouterr().err
