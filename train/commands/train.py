"""`kvpolicies train`: trains a scorer for a policy such as kvpop, from a recipe.

    kvpolicies train ledger-kvpop                       a recipe of the package, embedded model
    kvpolicies train my_recipe.yaml --power 1 --out runs/mine

A recipe's keys are the options below; those given on the command line win. The same command again
continues a run that was stopped, from its newest checkpoint.
"""

import argparse
from pathlib import Path

from kvpolicies import config
from kvpolicies.errors import UserError, caution
from kvpolicies.train.bounds import check_machine
from kvpolicies.train.recipe import Recipe, check_there, find, shipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "file",
        metavar="RECIPE",  # not `recipe`, which is one of its keys
        help=f"YAML file, or a recipe of the package: {', '.join(shipped())}",
    )
    parser.add_argument(
        "--resume", action="store_true", help="refuse to begin anew where nothing is to continue"
    )
    config.add_arguments(parser, Recipe)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints the held-out figures. Returns the exit status."""
    path = find(args.file)
    recipe = config.from_args(Recipe, args, config.read_yaml(path), str(path))
    check_there(recipe)  # neither takes seconds of imports
    check_machine(recipe)
    try:
        import lightning  # noqa: F401
    except ImportError:
        raise UserError("training needs lightning: pip install kvpolicies[train]") from None
    from kvpolicies.train.fit import SCORER, train

    known = train(recipe, args.resume)
    if "figures" in known:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in known["figures"].items())
        print(f"held out: {figures}")
        recall, chance = (known["figures"].get(name) for name in ("recall", "chance"))
        if recall is not None and chance is not None and not recall > chance:
            caution("the scorer keeps no more of what it should than chance does")
        print(f"{recipe.kind}(scorer={str(Path(recipe.out) / SCORER)!r}); {known['seconds']:.0f} s")
    return 0
