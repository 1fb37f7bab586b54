"""`kvpolicies revisit`: which queries look far back, at what, and what policies have lost by then.

    kvpolicies revisit                                            the embedded model, ledger traces
    kvpolicies revisit --traces results/study                     what full wrote in a study
    kvpolicies revisit --model smollm2 --traces solutions.jsonl --problems 4
    kvpolicies revisit --policies full --profile shares.yaml      what each layer needs (`layers:`)

Options may stand in a YAML file too, `kvpolicies revisit my.yaml`; those on the command line win.
The same command again continues a run that was stopped.
"""

import argparse
from pathlib import Path

from kvpolicies import config
from kvpolicies.eval.display import terminal
from kvpolicies.eval.revisit.config import Revisit
from kvpolicies.eval.revisit.run import run as analyse
from kvpolicies.eval.study import locks as claims


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options: one a field of Revisit."""
    parser.description = __doc__
    parser.add_argument("config", nargs="?", help="YAML file with the options below")
    config.add_arguments(parser, Revisit)


def run(args: argparse.Namespace) -> int:
    """Runs the analysis, writes its folder, prints what was used and what was lost."""
    values = config.read_yaml(args.config) if args.config else None
    asked = config.from_args(Revisit, args, values, args.config or "")
    resolved, rows = analyse(asked)
    from kvpolicies.eval.revisit import page

    with claims.reporting(Path(resolved.out)):
        summary = page.write(Path(resolved.out), resolved, rows)
        if resolved.profile:
            page.write_profile(Path(resolved.profile), resolved, rows)
    for sentence in summary["sentences"]:
        print(sentence)
    _print_losses(summary)
    print(f"\n{len(rows)} traces. Page: {Path(resolved.out) / page.NAME}")
    return 0


def _print_losses(summary: dict) -> None:
    from kvpolicies.eval.revisit.page import losses_table

    headings, lines = losses_table(summary)
    if lines:
        title = "lost by then (%, 95 % intervals over traces)"
        terminal.print_table(title, headings, lines)
