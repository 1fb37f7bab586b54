"""Where a deployment leaves what its studies measured, so that their accuracies may not hold."""

from typing import Any

from kvpolicies.eval.select.benches import Bench
from kvpolicies.eval.select.candidates import Candidate
from kvpolicies.eval.select.evidence import Evidence
from kvpolicies.eval.select.sources import StudyFolder
from kvpolicies.eval.study import asked
from kvpolicies.models.memory import Load

NOTABLE = 0.01
"""A share of samples worth a word."""


def cautions(evidence: Evidence, winner: Candidate, load: Load, config: Any) -> list[str]:
    """One sentence a way in which the deployment of `winner` is not what was measured.

    Args:
        config: of the model, as transformers has it.
    """
    said = [caution for source in evidence.sources for caution in _asked(source)]
    for bench in evidence.benches:
        said += _cut_off(bench, winner) + _lengths(bench, winner, load) + _slots(bench, winner)
    if load.prompt > evidence.prompt_tokens > 0:
        said.append(
            f"extrapolation: prompts of up to {load.prompt:,} tokens are to be deployed, "
            f"none longer than {evidence.prompt_tokens:,} was measured"
        )
    most = getattr(config, "max_position_embeddings", None)
    if most and load.prompt + load.new > most:
        said.append(
            f"prompt and new tokens reach {load.prompt + load.new:,} positions, the model "
            f"was made for {most:,}"
        )
    return said


def _asked(source: StudyFolder) -> list[str]:
    if source.told is None:
        return [
            f"{source.folder} does not say how its prompts were rendered, so that the deployment "
            "may render them otherwise"
        ]
    return [f"{source.study.task}: {one.removesuffix('.')}" for one in asked.cautions(source.told)]


def _cut_off(bench: Bench, winner: Candidate) -> list[str]:
    """Says how often full, which losses are against, and the winner were cut off."""
    said = []
    for label, cell in {"full": bench.full, winner.label: bench.cells[winner.cell]}.items():
        if (share := float(cell.cut.mean())) >= NOTABLE:
            said.append(
                f"{100 * share:.0f} % of {label}'s samples on {bench.label} were cut off at the "
                "limit of new tokens; under another limit its accuracy is another one"
            )
    return said


def _lengths(bench: Bench, winner: Candidate, load: Load) -> list[str]:
    if load.new > bench.limit:
        lost = "" if winner.is_full else ", and what eviction loses may grow with the length"
        return [
            f"extrapolation: {load.new:,} new tokens are to be deployed, {bench.label} was "
            f"measured up to {bench.limit:,}{lost}"
        ]
    cut = float((bench.cells[winner.cell].lengths > load.new).mean())
    if cut >= NOTABLE:
        return [
            f"{100 * cut:.0f} % of {winner.label}'s samples on {bench.label} were longer than "
            f"{load.new:,} tokens and would be cut off; its accuracy will be lower"
        ]
    return []


def _slots(bench: Bench, winner: Candidate) -> list[str]:
    if winner.is_full:
        return []
    said, mine = [], bench.cells[winner.cell]
    low, high = int(mine.slots.min()), int(mine.slots.max())
    if winner.cell.budget.endswith("%") and not low <= int(winner.budget) <= high:
        said.append(
            f"{winner.cell.budget} was {low:,} to {high:,} slots on {bench.label} and is "
            f"{int(winner.budget):,} as deployed"
        )
    idle = float((mine.prompts + mine.lengths <= mine.slots).mean())
    if idle >= 0.5:
        said.append(
            f"{100 * idle:.0f} % of {winner.label}'s samples on {bench.label} never filled "
            "its budget, so that they say nothing about eviction"
        )
    return said
