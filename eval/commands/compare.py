"""`kvpolicies compare`: the main job. Policies head to head, under one exact budget.

    kvpolicies compare                                   the embedded model, all policies
    kvpolicies compare gsm8k --model smollm2 --data gsm8k.jsonl --problems 8
    kvpolicies compare my_study.yaml --policies "beacon(n_beacon=8),random" --out results/mine
    kvpolicies compare gsm8k.yaml math.yaml --out results    two studies, results/gsm8k and /math

A study is a YAML file (its keys are the options below) or one of the package's; options given on
the command line win, in each of several. The same command again continues a run that was stopped,
and at the same time joins one that runs: any number of processes, on any machines that see the
folder, share the work.

    torchrun --nproc-per-node 2 -m kvpolicies compare my_study.yaml
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicies import config, streams
from kvpolicies.errors import UserError
from kvpolicies.eval.display import terminal
from kvpolicies.eval.study import asked, launch
from kvpolicies.eval.study import locks as claims
from kvpolicies.eval.study.config import Study, read_study, shipped
from kvpolicies.eval.study.preparing import SharedModel, check, prepare

if TYPE_CHECKING:
    from kvpolicies.eval.report.analysis import Analysis
    from kvpolicies.eval.study.summary import Summary
    from kvpolicies.eval.tasks.task import Problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options: one a field of Study."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "study",
        nargs="*",
        help=f"YAML files, or studies of the package, run in turn: {', '.join(shipped())}",
    )
    config.add_arguments(parser, Study)


def run(args: argparse.Namespace) -> int:
    """Runs the studies, writes their reports, prints their tables. Returns the exit status."""
    studies, found = chosen(args), []
    for where, study in studies:
        with _named(where):
            found.append(check(study))
    every = list(zip(studies, found, strict=True))
    if launch.here().leads:
        told = (f"{study.task} on {study.model}, {len(own)} problems" for (_, study), own in every)
        streams.tell(f"compare: {'; '.join(told)}: loading ...")
    with SharedModel() as kept:
        if len(studies) > 1:  # nothing wrong with the last may come up after hours of the first
            for (where, study), own in every:
                with _named(where):
                    prepare(study, kept, own)
        for (where, study), own in every:
            _run(where, study, own, kept)
    return 0


def _run(where: str, study: Study, problems: "list[Problem]", kept: SharedModel) -> None:
    """One study; what it held is free when it is done."""
    with _named(where):
        ready = prepare(study, kept, problems)
    from kvpolicies.eval import report
    from kvpolicies.eval.report import foreword
    from kvpolicies.eval.study.run import run_prepared

    if launch.here().leads:
        for sentence in asked.cautions(ready.asked):
            streams.say(sentence)
    ready = run_prepared(ready, kept)
    study = ready.study
    if not launch.here().leads:
        return
    folder = Path(study.out)
    with claims.reporting(folder):
        found = report.write_report(folder, study)
    for sentence in foreword.sentences(study, found.cells, ready.asked):
        print(sentence)
    print_table(study, found.cells)
    print_answer(study, found)
    print(f"\n{len(found.cells)} cells. Report: {folder / report.NAME}")


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Says of several studies which one is wrong; of one, "", nothing is to be added."""
    try:
        yield
    except UserError as error:
        if not where or str(error).startswith(where):
            raise
        raise UserError(f"{where}: {error}") from None


def chosen(args: argparse.Namespace) -> list[tuple[str, Study]]:
    """The studies that the command line names, its options over each; of several each with its
    file's name, by which `--out` then holds a folder for each.

    Raises:
        UserError: as `read_study`, a bad value; two studies that would write to one folder.
    """
    if len(args.study) < 2:
        values, path = read_study(args.study[0]) if args.study else (None, "")
        return [("", config.from_args(Study, args, values, path))]
    studies = []
    for name in args.study:
        with _named(name):
            study = config.from_args(Study, args, *read_study(name))
        if args.out is not None:
            study = replace(study, out=str(Path(args.out) / Path(name).stem))
        studies.append((name, study))
    folders = [Path(study.out).resolve() for _, study in studies]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"{folder}: out of two of the studies; give each its own, or --out DIR")
    return studies


def print_answer(study: Study, found: "Analysis") -> None:
    """The report's first screen: a table of policies by budget, and one sentence a budget."""
    from kvpolicies.eval.report import overview

    headings, lines = overview.table(study, found)
    terminal.print_table("", headings, lines)
    print("* does not differ significantly from the best at its budget.\n")
    print("\n".join(overview.answers(study, found)))


def print_table(study: Study, summaries: "Sequence[Summary]") -> None:
    """The study's table on standard output; entries fold where a terminal is narrow."""
    from kvpolicies.eval import report
    from kvpolicies.eval.study import lookahead

    headings, lines = report.table(study, summaries)
    title = f"{study.task} on {study.model} (95 % intervals)"
    terminal.print_table(title, headings, lines, sections=True)
    if any(cell.lookahead for cell in summaries):
        print(lookahead.note(study.entry.forced))
