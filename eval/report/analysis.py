"""A study's results in numbers: its cells, its comparisons, its power; and the files they go to."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvpolicies.eval.stats.power import POINTS, Power
from kvpolicies.eval.study import controls, pairs, summary
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.pairs import Pair
from kvpolicies.eval.study.summary import Summary
from kvpolicies.eval.tasks.measures import Row
from kvpolicies.files import without_nan, write_text

NAME = "summary.json"


@dataclass(frozen=True)
class Analysis:
    """All that a report says about a study, before it is put into words."""

    cells: list[Summary]
    """Full first, then by policy and budget."""
    pairs: list[Pair]
    """By budget: each policy against full, then against every other; none where nothing ran."""
    power: Power | None
    """None where answers are not right or wrong, or no pair differed on any problem."""


def analyse(study: Study, rows: Sequence[Row]) -> Analysis:
    """The analysis of a resolved study's rows; of an unfinished one, what is there."""
    compared = pairs.compare(study, rows)
    return Analysis(summary.summarise(study, rows), compared, pairs.note(study, compared))


def write(folder: Path, study: Study, found: Analysis) -> None:
    """Writes summary.csv (a line a cell), pairs.csv (a line a pair) and summary.json (both)."""
    summary.write_csv(folder / summary.NAME, study, found.cells)
    pairs.write_csv(folder / pairs.NAME, found.pairs)
    power = None if found.power is None else {**asdict(found.power), "points": POINTS}
    content = {
        "cells": [asdict(cell) for cell in found.cells],
        "pairs": [{**asdict(pair), "told_apart": pair.told_apart} for pair in found.pairs],
        "comparisons": len(found.pairs),
        "correction": "p_holm: Holm, over all pairs of the study",
        "power": power,
        "controls": controls.MEANINGS if any(cell.controls for cell in found.cells) else {},
    }
    text = json.dumps(without_nan(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / NAME, text + "\n")
