"""`kvpolicies ablate`: trains variants of a recipe, compares their scorers, in one table.

    kvpolicies ablate loss                        boundary loss, regression, or both
    kvpolicies ablate my_ablation.yaml --steps 160 --out results/mine

An ablation is a YAML file (train/ablation.py says how it reads) or one of the package's. The same
command again continues where it was stopped; variants that are trained already stay as they are.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicies.errors import UserError
from kvpolicies.eval.display import terminal
from kvpolicies.files import write_csv
from kvpolicies.train.ablation import OVERRIDES, Ablation, load_ablation, shipped
from kvpolicies.train.recipe import Recipe

if TYPE_CHECKING:
    from kvpolicies.train.packing import PackedRow

NAME = "ablation.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "ablation",
        metavar="ABLATION",
        help=f"YAML file, or an ablation of the package: {', '.join(shipped())}",
    )
    for name in OVERRIDES:
        parser.add_argument(f"--{name}", metavar=name.upper(), help=f"{name} of all variants")
    parser.add_argument("--problems", metavar="PROBLEMS", help="problems to compare on")
    parser.add_argument("--out", metavar="OUT", help="folder of runs and comparisons")


def run(args: argparse.Namespace) -> int:
    """Trains what is not trained, compares, prints the table. Returns the exit status."""
    given = {name: getattr(args, name) for name in (*OVERRIDES, "problems", "out")}
    given = {name: value for name, value in given.items() if value is not None}
    changes = {name: given.pop(name) for name in OVERRIDES if name in given}
    ablation = load_ablation(args.ablation, changes, **given)
    try:
        import lightning  # noqa: F401
    except ImportError:
        raise UserError("training needs lightning: pip install kvpolicies[train]") from None
    from kvpolicies.train.fit import train

    for number, (label, recipe) in enumerate(ablation.variants.items(), 1):
        print(f"{number}/{len(ablation.variants)} {label}: {recipe.out}", flush=True)
        train(recipe)
    headings, lines = table(ablation)
    path = Path(ablation.study.out) / NAME
    write_csv(path, [headings, *lines])
    terminal.print_table(f"ablation {ablation.name} (95 % intervals)", headings, lines)
    print(f"\n{path}")
    return 0


def table(ablation: Ablation) -> tuple[list[str], list[list[str]]]:
    """(headings, lines) of the trained variants: held-out figures, then the study's measures.

    Figures are means over layers and heads at the line's budget. `recall` is of the kept set of the
    variant's own (dense) target, `recall of the first's` of the first variant's target: one
    yardstick for all. A target is aged by the scorer's own decay.

    Raises:
        UserError: for what the study finds wrong.
    """
    from kvpolicies.eval import report
    from kvpolicies.eval.study import provenance
    from kvpolicies.eval.study.run import run_study
    from kvpolicies.registry import resolve
    from kvpolicies.train.fit import SCORER

    scorers = {k: str(Path(v.out) / SCORER) for k, v in ablation.variants.items()}
    policies = {
        label: str(resolve(f"{recipe.kind}(scorer={scorers[label]!r})"))
        for label, recipe in ablation.variants.items()
    }
    study = replace(ablation.study, policies=tuple(policies.values()))
    folder = run_study(study)
    study = provenance.joined(study.resolved())
    cells = {(c.policy, c.budget): c for c in report.write_report(folder, study).cells}
    held_out = figures(ablation, scorers)
    measures = study.entry.measures
    headings = ["variant", "slots", "recall", "recall of the first's", "decisions right"]
    headings += [item.heading + (" %" if item.percent else "") for item in measures]
    lines = []
    for label, policy in policies.items():
        for budget in ablation.budgets:
            own, common = (found[budget] for found in held_out[label])
            line = [label, str(budget), f"{own['recall']:.3f}", f"{common['recall']:.3f}"]
            line.append(f"{own['accuracy']:.3f}")
            cell = cells[policy, str(budget)]
            lines.append([*line, *(item.show(cell.values[item.key]) for item in measures)])
    return headings, lines


Held = dict[int, dict[str, float]]
"""Figures of held-out documents by budget."""


def figures(ablation: Ablation, scorers: dict[str, str]) -> dict[str, tuple[Held, Held]]:
    """By variant: figures against its own target, and against the first variant's."""
    from kvpolicies.learned.scorer import Scorer
    from kvpolicies.models import loading
    from kvpolicies.train import sources
    from kvpolicies.train.data import Data

    first = ablation.first
    model, tokenizer = loading.load(first.model, first.dtype, first.device)
    rows = Data(sources.open_source(first, sources.find(first), tokenizer), first).held_out
    done = {}
    for label, recipe in ablation.variants.items():
        scorer = Scorer.from_pretrained(scorers[label]).to(model.device)
        own = _judged(ablation, recipe, model, scorer, rows)
        same = recipe.target == first.target and recipe.min_future == first.min_future
        done[label] = (own, own if same else _judged(ablation, first, model, scorer, rows))
    return done


def _judged(
    ablation: Ablation, recipe: Recipe, model: Any, scorer: Any, rows: "Sequence[PackedRow]"
) -> Held:
    """The scorer's figures against the recipe's target."""
    import torch

    from kvpolicies.train.module import Frozen

    found = {}
    for budget in ablation.budgets:
        judge = Frozen(model, scorer, replace(ablation.judged(recipe), budget=(budget,)))
        for row in rows:
            tokens, documents = row.tokens[None], row.documents[None]
            device = model.device
            judge.teacher.teach(tokens.to(device), documents.to(device), judge.judge)
        judge.figures.close(lambda x: x, torch.device("cpu"))
        found[budget] = judge.figures.means()
    return found
