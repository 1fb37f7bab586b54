"""What a recipe asks of a machine, by arithmetic: refused before any of it is allocated.

Each figure is a part of what a step takes, and less than all of it: what is refused here could not
have run. `room.check` says both numbers.
"""

import math
import os
from typing import Any

from kvpolicies import room
from kvpolicies.errors import UserError
from kvpolicies.learned.config import ScorerConfig
from kvpolicies.learned.kinds import KINDS
from kvpolicies.train.recipe import Recipe

TOKEN = 32
"""Bytes of a token in a row while it is packed: lists of numbers, then two tensors."""
TRAINED = 24
"""Bytes of a parameter that trains: itself, its gradient, their product and its own gradient (see
module.py), AdamW's two means."""


def check_machine(recipe: Recipe) -> None:
    """Refuses rows that do not fit, and processes of which a machine has fewer; without torch."""
    rows = recipe.batch // recipe.accumulate
    what = f"batch {recipe.batch} of {recipe.sequence:,} tokens"
    room.check(rows * recipe.sequence * TOKEN, what, "lower batch or sequence")
    cores = os.cpu_count() or 1
    if recipe.workers > cores:
        raise UserError(f"workers {recipe.workers}: this machine has {cores} cores")
    if recipe.device == "cpu" and recipe.devices > cores:
        raise UserError(f"devices {recipe.devices} on cpu: this machine has {cores} cores")


def device_of(recipe: Recipe) -> Any:
    """The torch device that a recipe trains on; `cuda` of several is the first.

    Raises:
        UserError: for a device that this machine has not, or not so many of; for a strategy that
            it cannot run.
    """
    import torch

    kind, _, number = recipe.device.partition(":")
    there = {
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "cpu": os.cpu_count() or 1,
    }
    if kind == "auto":
        kind = next(name for name, count in there.items() if count)
    wanted = int(number) + 1 if number else recipe.devices
    if wanted > there[kind]:
        raise UserError(
            f"{recipe.devices} of device {recipe.device}: this machine has {there[kind]}"
        )
    if recipe.strategy == "fsdp" and kind != "cuda":
        raise UserError("strategy fsdp spreads a model over GPUs; on cpu and mps take auto or ddp")
    return torch.device(kind, int(number or 0)) if kind == "cuda" else torch.device(kind)


def check_scorer(recipe: Recipe, config: ScorerConfig) -> None:
    """Refuses a scorer whose training does not fit its device: weights, and a layer's activations.

    Raises:
        UserError: with what it would take.
    """
    from kvpolicies.learned.scorer import without_storage

    shapes = without_storage(config).state_dict().values()
    trained = TRAINED * sum(math.prod(weight.shape) for weight in shapes)
    tokens = recipe.batch // (recipe.devices * recipe.accumulate) * recipe.sequence
    numbers = KINDS[config.kind].held(config, tokens)
    sizes = {"hidden": config.hidden, "memory": config.memory}
    named = ", ".join(f"{name} {size:,}" for name, size in sizes.items() if size)
    what = f"training a scorer of {config.kind}{named and f' with {named}'}"
    instead = f"lower {named.partition(' ')[0] or 'batch'}, or batch and sequence"
    room.check(trained + 4 * numbers, what, instead, device_of(recipe))
