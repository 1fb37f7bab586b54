"""Recipes: what is refused, in one line, before a model, data or a package is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvpolicies.cli import main
from kvpolicies.errors import UserError
from kvpolicies.learned.config import KINDS
from kvpolicies.train.recipe import Recipe, load_recipe, shipped


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"sequense": 512}, "did you mean 'sequence'?"),
        ({"kind": "kvpopmlp"}, "did you mean 'kvpop_mlp'?"),
        ({"sequence": 133, "budget": 133}, "133 is not longer than the budget 133 (4 sinks + 32 "),
        ({"sequence": 160, "budget": [69, 133]}, "160 - (133 - 32 - 1) - 17 = 43 later queries"),
        (
            {"sequence": 512, "budget": 40, "delay": 16},
            "larger than the window of 10 that a budget of 40",
        ),
        ({"delay": 0}, "delay must be at least 1, got 0"),
        ({"lr": 1e7}, "lr must lie in (0, 1e+06]"),
        ({"sequence": 512, "budget": 38, "window": 33}, "leaves 1 slot to choose"),
        ({"sequence": 512, "budget": 36, "window": 32}, "leaves no slot to choose"),
        ({"batch": 6, "devices": 2, "accumulate": 2}, "6 does not divide into 2 devices x 2"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"lr": "fast"}, "lr: expected a number, got 'fast'"),
        ({"lr": 0}, "lr must lie in (0, 1e+06]"),
        ({"betas": [0.9]}, "betas must be two numbers"),
        ({"boundary": 0}, "nothing would be learned"),
        ({"kind": "dms", "at_entry": True}, "ablation of kvpop, not of dms"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"power": 0.5}, "power must be at least 1"),
        ({"columns": ["problem"]}, "data ledger makes its own problems"),
        ({"split": "test"}, "split 'test' has no effect"),
        ({"base_lr": 1e-3}, "is of recipe distill"),
        ({"kind": "kvpop_mlp", "memory": 8}, "memory 8 has no effect: is of kind kvpop"),
        ({"lse": "spares"}, "did you mean 'sparse'?"),
        ({"lse": "sparse", "sequence": 1024, "budget": [69, 101]}, "lse sparse needs one budget"),
        ({"lse": "sparse", "kind": "trimkv"}, "orders tokens the same at any age: not trimkv"),
        ({"hidden": 8}, "is of kinds kvpop_mlp and trimkv"),
    ],
)
def test_bad_recipes_are_refused_in_one_line(given, hint, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"out": str(tmp_path / "out"), **given}))
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert hint in error and str(path) in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"data": "leger"}, "did you mean 'ledger'?"),
        ({"data": "none/such.jsonl"}, "no such file or folder"),
        ({"model": "./none"}, "no such folder"),
    ],
)
def test_what_is_not_there_is_refused_before_a_model_is_loaded(given, hint, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"out": str(tmp_path / "out"), **given}))
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert hint in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_resume_wants_something_to_resume(tmp_path, capsys):
    argv = ["train", "ledger-kvpop", "--out", str(tmp_path / "none"), "--resume"]
    assert main(argv) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_unknown_recipes_name_the_nearest(capsys):
    assert main(["train", "ledger-kvpopp"]) == 2
    assert "did you mean 'ledger-kvpop" in capsys.readouterr().err


def test_the_packages_recipes_are_whole():
    recipes = {name: load_recipe(name) for name in shipped()}
    assert {r.kind for name, r in recipes.items() if name.startswith("ledger-")} == set(KINDS)
    assert len({r.out for r in recipes.values()}) == len(recipes)
    for name in ("ledger-kvpop", "ledger-kvpop-mlp", "ledger-dms", "ledger-trimkv"):
        assert [(b.total, b.window) for b in recipes[name].budgets] == [
            (69, 17),
            (101, 25),
            (133, 32),
        ]


def test_a_run_knows_its_own_recipe():
    recipe = Recipe()
    assert "out" not in recipe.identity() and recipe.identity()["betas"] == [0.9, 0.95]
    with pytest.raises(UserError, match="must lie in"):
        Recipe(held_out=0)


def test_commands_run_without_lightning():
    code = (
        "import sys; sys.modules['lightning'] = None\n"
        "from kvpolicies.cli import main\n"
        "assert main(['policies']) == 0\n"
        "assert main(['train', 'ledger-kvpop']) == 2\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install kvpolicies[train]" in done.stderr


def test_a_token_is_scored_as_it_leaves_the_smallest_window():
    for budget, window, lag in (((1024,), None, 32), ((133, 69), None, 17), ((96,), 8, 8)):
        recipe = Recipe(budget=budget, window=window, sequence=2048)
        assert recipe.delay is None
        assert recipe.lag == recipe.target.delay == recipe.identity()["delay"] == lag
    assert Recipe(delay=5).lag == 5
    for name in shipped():
        recipe = load_recipe(name)
        assert recipe.lag == min(budget.window for budget in recipe.budgets)
