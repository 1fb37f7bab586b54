"""`kvpolicies select`: the policy and budget to deploy, from finished studies and constraints.

    kvpolicies select results/study --memory 24GiB --batch 32 --max-tokens 8192 --largest-loss 0.03
    kvpolicies select results/gsm8k results/math --concurrency 16 --max-tokens 4096 \\
        --least-accuracy 0.55 --out deploy.yaml
    kvpolicies generate deploy.yaml --prompt "..."

With an accuracy constraint, the candidate of fewest bytes that meets it with confidence on every
task wins; under memory alone, the most accurate that fits. docs/select.md has the rule in full.

Exit status: 0 a choice was made and written; 2 bad input; 3 the data cannot tell (nothing is
written, but with --anyway); 4 no candidate meets the constraints (nothing is written).
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicies import config
from kvpolicies.errors import UserError
from kvpolicies.eval.display.bytesize import parse_bytes
from kvpolicies.eval.select.sources import read_source
from kvpolicies.files import check_free
from kvpolicies.options import check_options, option

if TYPE_CHECKING:
    from kvpolicies.eval.select.decision import Choice
    from kvpolicies.eval.select.evidence import Evidence
    from kvpolicies.models.memory import Load

CANNOT_TELL, NOTHING = 3, 4
"""Exit statuses beside 0 and 2."""


@dataclass(frozen=True)
class Wanted:
    """What is to be deployed, and within which limits."""

    model: str | None = option(None, "the model to deploy; default: the studies' own")
    memory: str | None = option(None, "most bytes: weights, cache, state, logits (24GiB, 80GB)")
    batch: int | None = option(None, "rows decoded at once", least=1)
    concurrency: int | None = option(None, "the same: requests served at once, a row each", least=1)
    max_tokens: int | None = option(None, "most new tokens of a request", least=1)
    prompt_tokens: int | None = option(
        None, "tokens of the longest prompt; default: the longest in the studies", least=1
    )
    least_accuracy: float | None = option(
        None, "least share of right samples, such as 0.55", least=0, most=1
    )
    largest_loss: float | None = option(
        None, "most that may be lost against full, such as 0.03", least=0, most=1
    )
    tolerance: float = option(
        0.03,
        "under memory alone: by how much another may be better than the choice",
        least=0,
        most=1,
    )
    out: str = option("deploy.yaml", "the deployment file to write")
    json: str | None = option(
        None,
        "where to write all figures; default: selection.json beside deploy.yaml, and "
        "NAME.selection.json beside NAME.yaml",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if (self.batch is None) == (self.concurrency is None):
            raise UserError("give --batch or --concurrency: how many rows are decoded at once")
        if self.max_tokens is None:
            raise UserError("give --max-tokens: how many new tokens a request may have")
        if self.memory is None and self.least_accuracy is None and self.largest_loss is None:
            raise UserError(
                "give a constraint to choose by: --memory, --least-accuracy or --largest-loss"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Study folders, the deployment and its constraints."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("studies", nargs="+", metavar="FOLDER", help="finished study folders")
    config.add_arguments(parser, Wanted)
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    parser.add_argument(
        "--anyway", action="store_true", help="where the data cannot tell, write the best estimate"
    )


def run(args: argparse.Namespace) -> int:
    """Chooses, prints why, writes deploy.yaml and selection.json. Returns the exit status."""
    wanted = config.from_args(Wanted, args)
    memory = None if wanted.memory is None else parse_bytes(wanted.memory)
    out = Path(wanted.out)
    check_free(out, "--out", args.force)
    record = Path(wanted.json) if wanted.json else _beside(out)
    if record == out:
        raise UserError(f"--json {record}: is --out too; name another file")
    check_free(record, "--json", args.force)
    for folder in args.studies:
        read_source(Path(folder))  # what is no study is refused before seconds of imports
    from kvpolicies.eval.select import candidates, evidence
    from kvpolicies.eval.select import decision as choice
    from kvpolicies.eval.select.decision import CHOSEN, NONE, Constraints
    from kvpolicies.eval.select.deploying import write_files

    limits = Constraints(memory, wanted.least_accuracy, wanted.largest_loss, wanted.tolerance)
    seen = evidence.read(args.studies, wanted.model)
    load = _load(wanted, seen)
    model = _model(seen)
    found, left_out = candidates.gather(seen, model, load)
    made = choice.choose(seen, found, limits)
    texts, said = _told(seen, made, load, left_out, model.config, (out, record))
    _print(seen, made, left_out, said)
    if made.verdict == CHOSEN or (made.verdict != NONE and args.anyway):
        write_files(texts)
        print(f"\nWritten: {out} (and {record})")
        return 0
    if wanted.json:
        write_files({record: texts[record]})
    print("\nNothing was written" + (f" but {record}." if wanted.json else "."))
    return NOTHING if made.verdict == NONE else CANNOT_TELL


def _beside(out: Path) -> Path:
    """Where the figures go: each deployment file has some of its own."""
    plain = out.stem == Path(Wanted.out).stem
    return out.parent / ("selection.json" if plain else f"{out.stem}.selection.json")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _load(wanted: Wanted, seen: "Evidence") -> "Load":
    from kvpolicies.models.memory import Load

    prompt = wanted.prompt_tokens or seen.prompt_tokens
    if not prompt:
        raise UserError("the studies do not say how long their prompts were: give --prompt-tokens")
    rows = wanted.batch or wanted.concurrency
    assert rows is not None and wanted.max_tokens is not None, "checked in Wanted"
    return Load(rows, prompt, wanted.max_tokens)


def _model(seen: "Evidence") -> Any:
    """The studies' model, with shapes and without weights."""
    import torch

    from kvpolicies.models.loading import load_config
    from kvpolicies.models.memory import meta_model

    return meta_model(load_config(seen.study.model), getattr(torch, seen.study.dtype))


def _told(
    seen: "Evidence",
    made: "Choice",
    load: "Load",
    left_out: dict[Any, str],
    model_config: Any,
    paths: tuple[Path, Path],
) -> tuple[dict[Path, str], list[str]]:
    """(texts by path, sentences)."""
    from kvpolicies.eval.select.cautions import cautions
    from kvpolicies.eval.select.deploying import deploy_yaml, selection_json
    from kvpolicies.eval.select.explaining import sentences

    command = shlex.join(["kvpolicies", *sys.argv[1:]])
    said = sentences(made)
    if made.winner is not None:
        said += [f"Caution: {one}." for one in cautions(seen, made.winner, load, model_config)]
    out, record = paths
    texts = {record: selection_json(seen, made, load, left_out, said, command)}
    if made.winner is not None:
        texts[out] = deploy_yaml(seen, made, load, said, command)
    return texts, said


def _print(seen: "Evidence", made: "Choice", left_out: dict[Any, str], said: Sequence[str]) -> None:
    from kvpolicies.eval.select import tables
    from kvpolicies.eval.select.benches import label

    tables.print_tables(seen, made)
    for cell, why in left_out.items():
        print(f"no candidate: {label(cell)} {why}")
    print()
    for sentence in said:
        print(sentence)
