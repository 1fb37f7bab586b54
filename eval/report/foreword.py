"""What is said before a study's table: what must be known to read its figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicies.eval.study import asked
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary


def sentences(study: Study, cells: Sequence[Summary], told: Mapping[str, Any] | None) -> list[str]:
    """How the model was asked, what it could not read, and which samples were cut off.

    Args:
        told: of run.json (`asked.describe`); None of a folder that has none.
    """
    said = [asked.rendered(told), *asked.cautions(told)] if told else []
    return said if study.entry.forced else [*said, *cut_off(study, cells)]


def cut_off(study: Study, cells: Sequence[Summary]) -> list[str]:
    """How many of full's samples, and of each policy's, ended at the limit of new tokens.

    A policy that looks ahead ends where full's text does, whatever it chose there; it is left out.
    """
    cells = [cell for cell in cells if not cell.lookahead]
    if not cells:
        return []
    if not any(cell.cut for cell in cells):
        return ["No sample was cut off at the limit of new tokens."]
    full = [cell for cell in cells if cell.is_full]
    said = [_of_full(cell) for cell in full]
    for budget in study.budgets:
        here = [cell for cell in cells if cell.budget == budget and not cell.is_full]
        some = sorted(
            (cell for cell in here if cell.cut), key=lambda cell: -cell.cut / cell.samples
        )
        none = [cell.policy for cell in here if not cell.cut]
        parts = [f"{cell.policy} {cell.cut} of {cell.samples}" for cell in some]
        parts += [f"none of {', '.join(none)}"] if none else []
        if parts:
            said.append(f"Cut off at budget {budget}: {'; '.join(parts)}.")
    return said


def _of_full(full: Summary) -> str:
    if not full.cut:
        return f"None of full's {full.samples} samples was cut off at the limit of new tokens."
    return (
        f"{full.cut} of full's {full.samples} samples were cut off at the limit of new tokens, "
        "unfinished, and count as they were graded: full's value here is no more than what it "
        "reaches under that limit."
    )
