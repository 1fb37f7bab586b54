"""`kvpolicies compare`: the main job. Policies head to head, under one exact budget.

    kvpolicies compare                                   the embedded model, all policies
    kvpolicies compare gsm8k --model smollm2 --data gsm8k.jsonl --problems 8
    kvpolicies compare my_study.yaml --policies "beacon(n_beacon=8),random" --out results/mine

A study is a YAML file (its keys are the options below) or one of the package's; options given on
the command line win. The same command again continues a run that was stopped, and at the same time
joins one that runs: any number of processes, on any machines that see the folder, share the work.

    torchrun --nproc-per-node 2 -m kvpolicies compare my_study.yaml
"""

import argparse
from collections.abc import Sequence

from kvpolicies import config
from kvpolicies.eval import claims, launch, lookahead, report
from kvpolicies.eval.run import run_study
from kvpolicies.eval.study import Study, load_study, shipped
from kvpolicies.eval.summary import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options: one a field of Study."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "study", nargs="?", help=f"YAML file, or a study of the package: {', '.join(shipped())}"
    )
    config.add_arguments(parser, Study)


def run(args: argparse.Namespace) -> int:
    """Runs the study, writes the report, prints the table. Returns the exit status."""
    base = load_study(args.study) if args.study else None
    study = config.from_args(Study, args, base=base)
    place = launch.here()
    folder = run_study(study)
    study = study.resolved()
    if not place.leads:
        return 0
    with claims.reporting(folder):
        summaries = report.write_report(folder, study)
    print_table(study, summaries)
    print(f"\n{len(summaries)} cells. Report: {folder / report.NAME}")
    return 0


def print_table(study: Study, summaries: Sequence[Summary]) -> None:
    """The study's table on standard output; entries fold where a terminal is narrow."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    headings, lines = report.table(study, summaries)
    shown = Table(title=f"{study.task} on {study.model} (95 % intervals)", box=None)
    for index, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
    before = ""
    for line in lines:
        if before and line[0] != before:
            shown.add_section()
        shown.add_row(*line)
        before = line[0]
    console.print(shown)
    if any(cell.lookahead for cell in summaries):
        console.print(lookahead.note(study.entry.forced))
