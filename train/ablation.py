"""An ablation: variants of one recipe, trained alike, then compared on one task in one table.

    base: ledger-kvpop                # a recipe of the package, or a YAML file beside this one
    recipe: {steps: 80}               # changes to it that all variants share
    variants:                         # what each changes beside
      kvpop: {}
      kvpop-at-entry: {at_entry: true}
    study: {budgets: [101], problems: 48}   # how they are compared: keys of a study
    out: results/ablations

Variants train in OUT/runs/NAME. Ablations that share `out` share those of one name, which then must
be the same recipe; the comparison of this file goes to OUT/compare/FILE.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicies import config
from kvpolicies.budget import BudgetSpec
from kvpolicies.config import from_mapping, read_yaml
from kvpolicies.errors import UserError, nearest, shown
from kvpolicies.eval.study.config import Study
from kvpolicies.train import recipe as recipes
from kvpolicies.train.recipe import Recipe

ABLATIONS = Path(__file__).parent / "ablations"
KEYS = ("base", "recipe", "variants", "study", "out")
OVERRIDES = ("steps", "seed", "device")
"""Options of the command that change all variants."""


@dataclass(frozen=True)
class Ablation:
    """What is trained and compared."""

    name: str
    variants: Mapping[str, Recipe]
    """By name, the first is what the others are compared with; each with its folder."""
    study: Study
    """Without its policies, which are the variants' scorers."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """The study's."""
        return tuple(map(int, self.study.budgets))

    @property
    def first(self) -> Recipe:
        """The first variant's recipe."""
        return next(iter(self.variants.values()))

    def judged(self, recipe: Recipe) -> Recipe:
        """The recipe at the study's budgets, where its figures are taken."""
        return replace(recipe, budget=self.budgets, delay=recipe.lag, lse="dense")


def load_ablation(
    name: str, changes: Mapping[str, str], problems: str | None = None, out: str | None = None
) -> Ablation:
    """The ablation in a YAML file: a path, or the name of one that ships with the package.

    Args:
        changes: recipe options, as text, that win over the file's in all variants.
        problems, out: the same of the study's problems and the folder.

    Raises:
        UserError: for what cannot be trained or compared, before anything is.
    """
    path = config.find_yaml(name, ABLATIONS, "ablation")
    given = _mapping(read_yaml(path), str(path))
    if unknown := [key for key in given if key not in KEYS]:
        raise UserError(f"{path}: unknown key {unknown[0]!r}: {nearest(str(unknown[0]), KEYS)}")
    given_out = given.get("out", "results/ablations")
    if not isinstance(given_out, str) or not given_out.strip():
        raise UserError(f"{path}: out: expected text, got {shown(given_out)}")
    folder = Path(out or given_out)
    shared = {**_base(given, path), **_mapping(given.get("recipe"), f"{path}: recipe"), **changes}
    variants = {}
    for label, options in _mapping(given.get("variants"), f"{path}: variants").items():
        where = f"{path}: {label}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(label)):
            raise UserError(f"{where}: a variant's name is letters, digits, '.', '_' and '-'")
        own = _mapping(options, where)
        if clash := set(own) & {*changes, "out"}:
            raise UserError(f"{where}: {sorted(clash)[0]} is not this variant's own to set")
        values = {**shared, **own, "out": str(folder / "runs" / str(label))}
        variants[str(label)] = from_mapping(Recipe, values, where)
    study = _mapping(given.get("study"), f"{path}: study")
    study = {**study, "out": str(folder / "compare" / path.stem)}
    if problems is not None:
        study["problems"] = problems
    ablation = Ablation(path.stem, variants, _study(study, variants, f"{path}: study"))
    _check(ablation, str(path))
    return ablation


def shipped() -> list[str]:
    """Names of the ablations that come with the package."""
    return config.shipped(ABLATIONS)


def _base(given: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """What the base recipe's file says."""
    base = given.get("base")
    if base is None:
        return {}
    beside = path.parent / str(base)
    found = beside if beside.is_file() else recipes.find(str(base))
    return _mapping(read_yaml(found), str(found))


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected keys and values, got {type(value).__name__}")
    return value


def _study(values: Mapping[str, Any], variants: Mapping[str, Recipe], where: str) -> Study:
    for key in ("model", "policies", "sinks", "window"):
        if key in values:
            raise UserError(f"{where}: {key} follows from the variants; leave it out")
    if len(variants) < 2:
        raise UserError(f"{where}: give at least two variants to compare, got {len(variants)}")
    first = next(iter(variants.values()))
    given = {"model": first.model, "sinks": first.sinks, "window": first.window}
    study = from_mapping(Study, {"device": first.device, **values, **given}, where)
    specs = [BudgetSpec(budget) for budget in study.budgets or map(str, first.budget)]
    if any(spec.is_share for spec in specs):
        raise UserError(f"{where}: budgets must be numbers of slots, got {list(study.budgets)}")
    study = replace(study, budgets=tuple(spec.text for spec in specs))
    try:
        study.check()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return study


def _check(ablation: Ablation, where: str) -> None:
    """Refuses variants that one table cannot hold."""
    told: dict[str, str] = {}
    for label, recipe in ablation.variants.items():
        for key, wanted in (
            ("recipe", "frozen"),
            ("devices", 1),
            ("sinks", ablation.first.sinks),
            ("window", ablation.first.window),
        ):
            if (value := getattr(recipe, key)) != wanted:
                raise UserError(f"{where}: {label}: an ablation needs {key} {wanted}, got {value}")
        if recipe.model != ablation.first.model:
            raise UserError(f"{where}: {label}: all variants must be of one model")
        try:
            ablation.judged(recipe)
        except UserError as error:
            raise UserError(f"{where}: {label}, at the study's budgets: {error}") from None
        recipes.check_there(recipe)
        same = told.setdefault(repr(sorted(recipe.identity().items())), label)
        if same != label:
            raise UserError(f"{where}: {same} and {label} are the same recipe")
