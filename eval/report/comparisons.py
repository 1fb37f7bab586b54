"""All pairs of policies: a grid a budget, and a list."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicies.eval.report.table import Entry
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.pairs import Pair

HEADINGS = ("policy", "minus", "budget", "difference", "p", "p, Holm", "significant")


def grids(study: Study, pairs: Sequence[Pair], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """For each budget the policies that meet there, and what each line is minus each column.

    `labels`: what a policy is called.
    """
    found = []
    for budget in study.budgets:
        here = [pair for pair in pairs if pair.budget == budget]
        names = list(dict.fromkeys(name for pair in here for name in (pair.a, pair.b)))
        known = {(p.a, p.b): (p, 1) for p in here} | {(p.b, p.a): (p, -1) for p in here}
        lines = [
            {
                "name": labels[a],
                "entries": [_entry(study, *known.get((a, b), (None, 1))) for b in names],
            }
            for a in names
        ]
        if here:
            called = [labels[name] for name in names]
            found.append({"budget": budget, "names": called, "lines": lines})
    return found


def listed(study: Study, pairs: Sequence[Pair], labels: Mapping[str, str]) -> list[list[Entry]]:
    """A line a pair, by the columns of `HEADINGS`."""
    measure = study.entry.measures[0]
    return [
        [
            Entry(labels[pair.a], pair.a),
            Entry(labels[pair.b], pair.b),
            Entry(pair.budget, study.budgets.index(pair.budget)),
            Entry(measure.show(pair.difference, signed=True), pair.difference.value),
            Entry(chance(pair.p), pair.p),
            Entry(chance(pair.p_holm), pair.p_holm),
            Entry("yes" if pair.told_apart else "", int(pair.told_apart)),
        ]
        for pair in pairs
    ]


def chance(p: float) -> str:
    """A p-value; never rounded to nothing."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _entry(study: Study, pair: Pair | None, sign: int) -> dict[str, str] | None:
    if pair is None:
        return None
    measure = study.entry.measures[0]
    value, low, high = (sign * x for x in pair.difference)
    shown = pair.difference._replace(value=value, low=min(low, high), high=max(low, high))
    good = value > 0 if measure.higher_is_better else value < 0
    kind = ("above" if good else "below") if pair.told_apart else ""
    title = f"{measure.show(shown, signed=True)}, p after Holm {chance(pair.p_holm)}"
    one = measure.show(shown._replace(low=math.nan), signed=True)
    return {"kind": kind, "gap": one, "p": chance(pair.p_holm), "title": title}
