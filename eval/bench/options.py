"""The options of `bench`: from a deployment file, and from text.

They have names and defaults of their own.

What the command line gives wins over the file, and the file over the defaults.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from kvpolicies.budget import PROMPT, BudgetSpec
from kvpolicies.config import Deployment, from_mapping, read_yaml
from kvpolicies.errors import UserError

DEFAULTS = {
    "policies": "transformers,full,streaming,beacon",
    "budgets": "512",
    "batch_sizes": "8",
    "new": 1024,
    "dtype": "float32",
    "device": "auto",
    "step": "auto",
}
"""Of options that a deployment file can give; the parser leaves them at None."""
_CALLED = {
    "policy": "policies",
    "budget": "budgets",
    "batch_size": "batch_sizes",
    "max_new_tokens": "new",
    **{key: key for key in ("model", "sinks", "window", "dtype", "device", "step")},
}
"""Keys of a deployment, and what `bench` calls them."""


def settled(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with the deployment file `args.config`, if there is one, and then the defaults.

    Raises:
        UserError: a file that cannot be read, or that holds what `bench` cannot run.
    """
    values = dict(vars(args))
    given = {key for key, name in _CALLED.items() if values.get(name) is not None}
    file = _options(args.config, given) if args.config else {}
    if values.get("random"):
        file.pop("model", None)
    for source in (file, DEFAULTS):
        values.update({key: x for key, x in source.items() if values.get(key) is None})
    return argparse.Namespace(**values)


def _options(path: str, given: set[str]) -> dict[str, Any]:
    """The file's options, but for those keys that the command line has given."""
    values = read_yaml(path)
    if isinstance(values, Mapping):
        values = {key: value for key, value in values.items() if key not in given}
    deployment = from_mapping(Deployment, values, path)
    if deployment.kernels != Deployment.kernels:
        raise UserError(f"{path}: bench takes no 'kernels': it times those that would be used")
    options = {name: getattr(deployment, key) for key, name in _CALLED.items()}
    return {**options, "batch_sizes": str(options["batch_sizes"])}


def whole_number(text: str) -> int:
    """An option's number, for argparse; digits of other scripts are none."""
    try:
        return int(text.encode("ascii"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def sinks(text: str) -> int | str:
    """An option's number, or the word for all of the prompt."""
    return text if text == PROMPT else whole_number(text)


def budgets_of(args: argparse.Namespace) -> list[BudgetSpec]:
    """The budgets that the command line names, each once, with its sinks and window."""
    parts = args.budgets.split(",")
    return list(dict.fromkeys(BudgetSpec(part, args.sinks, args.window) for part in parts))


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers between commas.

    Raises:
        UserError: for anything else.
    """
    try:
        numbers = [int(part.encode("ascii")) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} {text!r}: expected whole numbers >= 1, such as 1,8,32")
    return numbers
