"""A deployment file as the options of `bench`, which have names and defaults of their own.

What the command line gives wins over the file, and the file over the defaults.
"""

import argparse
from typing import Any

from kvpolicies.config import Deployment, load_yaml
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


def settled(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with the deployment file `args.config`, if there is one, and then the defaults.

    Raises:
        UserError: a file that cannot be read, or that holds what `bench` cannot run.
    """
    values = dict(vars(args))
    file = _options(args.config) if args.config else {}
    if values.get("random"):
        file.pop("model", None)
    for source in (file, DEFAULTS):
        values.update({key: x for key, x in source.items() if values.get(key) is None})
    return argparse.Namespace(**values)


def _options(path: str) -> dict[str, Any]:
    deployment = load_yaml(Deployment, path)
    plain = Deployment()
    for key in ("sinks", "window", "kernels"):
        if getattr(deployment, key) != getattr(plain, key):
            raise UserError(f"{path}: bench treats all policies alike and takes no {key!r}")
    return {
        "model": deployment.model,
        "policies": deployment.policy,
        "budgets": deployment.budget,
        "batch_sizes": str(deployment.batch_size),
        "new": deployment.max_new_tokens,
        "dtype": deployment.dtype,
        "device": deployment.device,
        "step": deployment.step,
    }
