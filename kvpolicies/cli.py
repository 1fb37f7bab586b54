"""The command line: a table of commands, one-line errors, exit status 2 for bad input."""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kvpolicies.errors import Caution, UserError, nearest
from kvpolicies.registry import load

# name: (module with `add_arguments(parser)` and `run(args) -> int`, what it does)
COMMANDS = {
    "policies": ("kvpolicies.listing", "list all policies with source and options"),
    "compare": ("kvpolicies.eval.compare", "compare policies on a task, under one exact budget"),
    "bench": ("kvpolicies.eval.commands.bench", "measure speed and memory of policies"),
    "generate": ("kvpolicies.eval.commands.generate", "generate from prompts under a policy"),
    "serve": ("kvpolicies.eval.commands.serve", "serve a deployment: an OpenAI-compatible API"),
    "replay": (
        "kvpolicies.eval.commands.replay",
        "check a recorded trace by one masked dense forward",
    ),
    "revisit": (
        "kvpolicies.eval.commands.revisit",
        "which queries look far back, and what policies lose",
    ),
    "select": (
        "kvpolicies.eval.commands.select",
        "choose a policy and budget to deploy, from studies and constraints",
    ),
    "train": ("kvpolicies.train.command", "train the scorer of a learned policy"),
    "ablate": ("kvpolicies.train.ablate", "train variants of a recipe and compare their scorers"),
}


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 2 for bad input, 130 when interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _one_line(warnings.showwarning)
            return _run(argv)
    except UserError as error:
        print(f"kvpolicies: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvpolicies: interrupted; what was written stays", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _one_line(before: Callable[..., Any]) -> Callable[..., Any]:
    """Python's way to show a warning, but for ours, once each."""
    told: set[str] = set()

    def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, Caution):
            if str(message) in told:
                return
            told.add(str(message))
            print(f"kvpolicies: caution: {message}", file=sys.stderr)
        else:
            before(message, category, *where, **options)

    return show


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from kvpolicies import __version__

        print(__version__)
        return 0
    name = argv[0]
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}: {nearest(name, list(COMMANDS))}")
    parser = parser_of(name)
    return load(f"{COMMANDS[name][0]}:run")(parser.parse_args(argv[1:]))


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command of `COMMANDS`; what it refuses is raised as UserError."""
    target, text = COMMANDS[name]
    parser = _Parser(
        prog=f"kvpolicies {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    load(f"{target}:add_arguments")(parser)
    return parser


def _usage() -> str:
    rows = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    return f"usage: kvpolicies COMMAND ...\n\n{rows}\n\nkvpolicies COMMAND --help shows an example."
