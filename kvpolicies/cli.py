"""The command line: a table of commands, one-line errors, exit status 2 for bad input."""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kvpolicies import streams
from kvpolicies.errors import Caution, UserError, explained, is_text, nearest, one_line, shown
from kvpolicies.registry import load

# name: (module with `add_arguments(parser)` and `run(args) -> int`, what it does)
COMMANDS = {
    "policies": ("kvpolicies.listing", "list all policies with source and options"),
    "compare": (
        "kvpolicies.eval.commands.compare",
        "compare policies on a task, under one exact budget",
    ),
    "bench": ("kvpolicies.eval.commands.bench", "measure speed and memory of policies"),
    "generate": ("kvpolicies.eval.commands.generate", "generate from prompts under a policy"),
    "serve": ("kvpolicies.eval.commands.serve", "serve a deployment: an OpenAI-compatible API"),
    "vllm": ("kvpolicies.vllm.launcher", "serve a deployment inside vLLM, on its own server"),
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
    "train": ("kvpolicies.train.commands.train", "train the scorer of a learned policy"),
    "import": (
        "kvpolicies.train.commands.importing",
        "turn published weights of a scorer into this package's format",
    ),
    "calibrate": (
        "kvpolicies.train.commands.calibrate",
        "take the statistics of a model that triattention needs",
    ),
    "ablate": (
        "kvpolicies.train.commands.ablate",
        "train variants of a recipe and compare their scorers",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def print_help(self, file: Any = None) -> None:
        """Prints the help; the base says nothing of a full disk."""
        print(self.format_help(), end="", file=file)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 2 for bad input, 130 when interrupted.

    This is the one place where a failure becomes a line: a `UserError`, and whatever the system,
    a decoder, a template or a lack of memory has to say (`errors.explained`). Any other exception
    is a fault of ours, and keeps its traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    streams.steady()
    status, message = 2, ""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _one_line(warnings.showwarning)
            status = _run(argv)
    except KeyboardInterrupt:
        status, message = 130, "interrupted; what was written stays"
    except BrokenPipeError:  # whoever reads has read enough
        status = 0
    except Exception as error:
        said = explained(error)
        if said is None:
            raise
        message = said
    return streams.finish(status, one_line(message))


def _one_line(before: Callable[..., Any]) -> Callable[..., Any]:
    """Python's way to show a warning, but for ours, once each."""
    said: set[str] = set()

    def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, Caution):
            if str(message) in said:
                return
            said.add(str(message))
            streams.say(one_line(f"caution: {message}"))
        else:
            before(message, category, *where, **options)

    return show


def _run(argv: list[str]) -> int:
    for number, argument in enumerate(argv, 1):
        if not is_text(argument):
            raise UserError(f"argument {number} is not UTF-8 text: {shown(argument)}")
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from kvpolicies import __version__

        print(__version__)
        return 0
    name = argv[0]
    if name not in COMMANDS:
        raise UserError(f"unknown command {shown(name)}: {nearest(name, list(COMMANDS))}")
    try:
        args = parser_of(name).parse_args(argv[1:])
    except SystemExit:  # --help
        return 0
    if empty := [key for key, value in vars(args).items() if value == ""]:
        raise UserError(f"{empty[0]}: empty; leave it out for its default (see {name} --help)")
    return load(f"{COMMANDS[name][0]}:run")(args)


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
