"""In which order problems and cells stand on the page."""

import re
from collections.abc import Iterable, Sequence

from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary


def by_name(names: Iterable[str]) -> list[str]:
    """Names sorted as people do: ledger-2 before ledger-10."""
    return sorted(names, key=_parts)


def by_budget(study: Study, cells: Sequence[Summary]) -> list[Summary]:
    """Full first, then budget by budget, as the study lists them."""
    place = {budget: i for i, budget in enumerate(study.budgets)}
    return sorted(cells, key=lambda cell: place.get(cell.budget, -1))


def title(cell: Summary) -> str:
    """`beacon @ 69`."""
    return cell.label if cell.is_full else f"{cell.label} @ {cell.budget}"


def _parts(name: str) -> tuple[list[str | int], str]:
    parts = re.split(r"([0-9]+)", name)  # text and number in turn, so that like meets like
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name
