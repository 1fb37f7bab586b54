"""run.json of a training run: what it was and is, and whether another may continue it."""

import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.eval.study.provenance import describe_model, environment
from kvpolicies.files import is_number, make_folder, parts_of, read_json, write_json
from kvpolicies.learned.scorer import Scorer
from kvpolicies.train.recipe import Recipe

NAME = "run.json"
_KINDS = {
    "recipe": dict, "model": dict, "scorer": dict, "environments": list, "seconds": float,
    "finished": bool,
}  # fmt: skip
PACKAGES = ("lightning", "xlstm", "datasets")


def check(recipe: Recipe) -> dict[str, Any] | None:
    """What is known of the run in the recipe's folder, if there is one; writes nothing.

    Raises:
        UserError: if it is another run, or the folder's file cannot be read.
    """
    path = Path(recipe.out) / NAME
    if not path.exists():
        if (Path(recipe.out) / "checkpoints").exists():
            raise UserError(f"{recipe.out}: holds checkpoints without {NAME}; choose another --out")
        return None
    known = _read(path)
    # An option that came after the run was begun had its default then.
    before = {**Recipe().identity(), **known["recipe"]}
    changed = [k for k, v in recipe.identity().items() if before.get(k) != v]
    if changed:
        now = recipe.identity()
        what = ", ".join(f"{key} ({before.get(key)} -> {now[key]})" for key in changed)
        raise UserError(f"{recipe.out}: holds another run; different: {what}")
    return known


def _read(path: Path) -> dict[str, Any]:
    """What `begin` and `finish` wrote, each part of its kind."""
    where = f"{path}: not the record of a training run; choose another --out"
    known = parts_of(read_json(path), _KINDS, where)
    if not all(isinstance(entry, dict) for entry in known["environments"]):
        raise UserError(f"{where} (its 'environments')")
    figures = known.get("figures", {})
    if not isinstance(figures, dict) or not all(map(is_number, figures.values())):
        raise UserError(f"{where} (its 'figures')")
    return known


def begin(recipe: Recipe, model: Any, scorer: Scorer) -> dict[str, Any]:
    """Writes run.json, or adds this environment to it; returns what it says.

    Raises:
        UserError: if the run was begun with other weights of the model.
    """
    known = check(recipe)
    described = describe_model(model)
    if known is None:
        known = {
            "recipe": recipe.identity(),
            "model": described,
            "scorer": {
                "kind": scorer.config.kind,
                "parameters": sum(p.numel() for p in scorer.parameters()),
                "state_bytes_a_layer": state_bytes(scorer),
            },
            "environments": [],
            "seconds": 0.0,
            "finished": False,
        }
    if known["model"] != described:
        raise UserError(f"{recipe.out}: was begun with other weights of {recipe.model}")
    here = environment()
    here["packages"].update({name: _version(name) for name in PACKAGES})
    if here not in known["environments"]:
        known["environments"].append(here)
    _write(recipe, known)
    return known


def finish(recipe: Recipe, figures: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Adds the final figures; returns what run.json says now.

    Args:
        seconds: of this start of the run; those before a kill are not counted.
    """
    known = check(recipe)
    assert known is not None
    known.update(finished=True, figures=dict(figures), seconds=round(known["seconds"] + seconds, 1))
    _write(recipe, known)
    return known


def state_bytes(scorer: Scorer) -> int:
    """What a sequence carries along at one layer, float32."""
    return sum(4 * math.prod(shape) for shape in scorer.config.state_shapes.values())


def _write(recipe: Recipe, known: Mapping[str, Any]) -> None:
    folder = make_folder(recipe.out, "--out")
    write_json(folder / NAME, known)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
