"""What a study shows, in plain sentences made from its numbers alone.

Two policies differ significantly only if the interval of their paired difference leaves zero out
and a paired sign-flip test agrees; where the plain intervals overlap that is said, since
overlapping intervals neither prove nor rule out a difference between cells that saw the same
problems.
"""

from collections.abc import Iterator, Sequence

from kvpolicies.eval.report.analysis import Analysis
from kvpolicies.eval.stats import intervals as stats
from kvpolicies.eval.stats import power
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.eval.study import controls
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary
from kvpolicies.eval.tasks.measures import Measure, Row

FEW = 30  # problems
LITTLE = 0.3  # of what full gets right
ALPHA = 0.05


def sentences(study: Study, summaries: Sequence[Summary], rows: Sequence[Row]) -> list[str]:
    """The summary of a study: full first, one sentence group a budget, then the caveats."""
    measure = study.entry.measures[0]
    full = next((cell for cell in summaries if cell.is_full), None)
    said = [_reference(study, full, measure)] if full else []
    for budget in study.budgets:
        here = [c for c in summaries if c.budget == budget and not c.is_full]
        cells = [c for c in here if not c.lookahead and not c.beyond]
        if cells:
            said.append(_at_budget(study, budget, cells, full, rows))
        said += [_apart(study, cell) for cell in here if cell not in cells]
        said += _controlled(measure, _named(budget), cells)
    return said + _caveats(study, summaries)


def _reference(study: Study, full: Summary, measure: Measure) -> str:
    per = f" with {full.samples // full.problems} samples each" if study.samples > 1 else ""
    head = f"{full.problems} problems{per}, {study.model} on {study.task}. "
    if study.entry.forced:
        nll = study.entry.measures[-1]
        return (
            f"{head}The worked solutions were fed token by token. Without eviction (full) the "
            f"model's mean negative log-likelihood is {nll.show(full.values[nll.key])} nats a "
            "token; KL and top-1 agreement compare each policy with full, token by token."
        )
    value = full.values[measure.key]
    text = (
        f"{head}Without eviction (full) the model reaches {measure.show(value)} % "
        f"{measure.heading}, holding up to {full.max_slots} slots."
    )
    if chance := study.entry.chance:
        text += f" A guess is right {100 * chance:.0f} % of the time."
    if value.value < LITTLE:
        text += (
            " That leaves little to lose: where full itself is so often wrong, this study tells "
            "policies apart poorly."
        )
    return text


def _at_budget(
    study: Study, budget: str, cells: list[Summary], full: Summary | None, rows: Sequence[Row]
) -> str:
    measure = study.entry.measures[0]
    sign = 1 if measure.higher_is_better else -1
    ranked = sorted(cells, key=lambda c: -sign * c.values[measure.key].value)
    best = ranked[0]
    top = best.values[measure.key].value
    level = [c.policy for c in ranked if c.values[measure.key].value == top]
    rest = [cell for cell in ranked if cell.policy not in level]
    text = (
        f"At {_named(budget)}: {_listed(level)} {'has' if len(level) == 1 else 'share'} the "
        f"{'highest' if sign > 0 else 'lowest'} {measure.singular}, "
        f"{measure.show(best.values[measure.key])}{' %' if measure.percent else ''}."
    )
    if full and measure.against_full:
        text += _to_full(measure, best, cells)
    return text + (_to_others(study, measure, best, rest, rows) if rest else "")


def _named(budget: str) -> str:
    return f"{budget} of the length" if budget.endswith("%") else f"{budget} slots"


def _apart(study: Study, cell: Summary) -> str:
    """A cell that is no contestant at its budget, and why."""
    measure = study.entry.measures[0]
    value = measure.show(cell.values[measure.key]) + (" %" if measure.percent else "")
    head = f"{cell.label} at {_named(cell.budget)}: {value}. It is no contestant there"
    if cell.beyond:
        return f"{head}: by its paper's own rule it holds up to {cell.max_slots} slots."
    told = "looks ahead" if study.entry.forced else "chooses with full's own tokens as context"
    return f"{head} but one that knows what is to come: it {told}."


def _to_full(measure: Measure, best: Summary, cells: list[Summary]) -> str:
    gap = best.differences[measure.key]
    told = "a difference" if gap.excludes_zero else "no difference is shown"
    text = f" Minus full, on the same problems: {measure.show(gap, signed=True)} points, {told}."
    close = [c.policy for c in cells if not c.differences[measure.key].excludes_zero]
    others = [name for name in close if name != best.policy]
    return text + (
        f" No significant difference from full either: {_listed(others)}." if others else ""
    )


def _to_others(
    study: Study, measure: Measure, best: Summary, rest: list[Summary], rows: Sequence[Row]
) -> str:
    mine = _rows_of(rows, best)
    behind, close, overlapping = [], [], []
    for cell in rest:
        theirs = _rows_of(rows, cell)
        above, reference, _ = measure.paired(mine, theirs)
        gaps = [x - y for x, y in zip(above, reference, strict=True)]
        # On few problems Student's interval may leave zero out where no test of signs could.
        apart = measure.difference(mine, theirs).excludes_zero and (
            stats.sign_flip(gaps, study.seed) < ALPHA
        )
        (behind if apart else close).append(cell.policy)
        if best.values[measure.key].overlaps(cell.values[measure.key]):
            overlapping.append(cell.policy)
    text = f" {best.policy} is ahead, problem by problem, of {_listed(behind)}." if behind else ""
    if close:
        text += f" It does not differ significantly from {_listed(close)}."
    if overlapping:
        text += f" Its interval overlaps with that of {_listed(overlapping)}."
    return text


def _controlled(measure: Measure, budget: str, cells: Sequence[Summary]) -> list[str]:
    """What the controls say of the contestants at one budget, where it matters."""
    ready = [cell for cell in cells if cell.controls.keys() == controls.NAMES.keys()]
    told = [cell for cell in ready if cell.controls[controls.LENGTH].tells]
    return [*_stopping(measure, budget, ready), *_lengths(measure, budget, told)]


def _stopping(measure: Measure, budget: str, cells: Sequence[Summary]) -> Iterator[str]:
    """Who is no better than a full cache that stops where the budget is full."""
    gaps = {cell.policy: _better_by(measure, cell, controls.MEMORY) for cell in cells}
    behind = [name for name, gap in gaps.items() if gap.high < 0]
    level = [name for name, gap in gaps.items() if gap.low <= 0 <= gap.high]
    if not behind and not level:
        return
    reached = {measure.show(cell.controls[controls.MEMORY].values[measure.key]) for cell in cells}
    said = f" reaches {reached.pop()} %" if len(reached) == 1 and measure.percent else ""
    text = f"At {budget}, full stopped where that memory is full{said}."
    if level:
        text += f" Not shown to be any better than so stopping: {_listed(level)}."
    if behind:
        text += f" Worse than so stopping: {_listed(behind)}."
    yield text


def _lengths(measure: Measure, budget: str, cells: Sequence[Summary]) -> Iterator[str]:
    """Whose difference to full is another one at the same length."""
    sign = 1 if measure.higher_is_better else -1
    short, ahead = [], []
    for cell in cells:
        gap, plain = _better_by(measure, cell, controls.LENGTH), cell.differences[measure.key]
        if gap.low > 0:
            ahead.append(cell.policy)
        elif gap.high >= 0 and plain.excludes_zero and sign * plain.value < 0:
            short.append(cell.policy)
    if ahead:
        yield f"At {budget}, full cut to the same lengths is behind {_listed(ahead)}."
    if short:
        yield (
            f"At {budget}, full cut to the same lengths does not differ significantly from "
            f"{_listed(short)}: it is not shown that they lose more than a text so short would; "
            "which of the two "
            "caused the other, this does not tell."
        )


def _better_by(measure: Measure, cell: Summary, name: str) -> Interval:
    """The cell minus its control, above 0 where the cell is the better one."""
    gap = cell.controls[name].differences[measure.key]
    return gap if measure.higher_is_better else Interval(-gap.value, -gap.high, -gap.low)


def _caveats(study: Study, summaries: Sequence[Summary]) -> list[str]:
    said = []
    over = sum(cell.over_budget for cell in summaries)
    granted = ", or than its paper's own rule grants" if any(c.beyond for c in summaries) else ""
    said.append(
        f"No head ever held more slots than its budget{granted}."
        if over == 0
        else f"{over} samples held more slots than their budget: the cache is broken."
    )
    looping = [cell for cell in summaries if cell.looping > 0 and not cell.lookahead]
    if looping:
        worst = max(looping, key=lambda c: c.looping)
        said.append(
            "Cut off while they repeated themselves: up to "
            f"{100 * worst.looping:.0f} % of a cell's samples ({worst.policy} at {worst.budget})."
        )
    problems = max((cell.problems for cell in summaries), default=0)
    few = f" With {problems} problems they are wide." if problems < FEW else ""
    said.append(
        "Intervals are 95 % intervals of one comparison each, over problems, and are not "
        f"corrected for the number of comparisons (pairs.csv has p-values that are).{few} They "
        "hold for problems like these and this model, and say nothing about other models or tasks."
    )
    return said


def compared(study: Study, found: Analysis) -> list[str]:
    """All comparisons after their correction, and how small a difference could have been told."""
    if not found.pairs:
        return []
    apart = sum(pair.told_apart for pair in found.pairs)
    said = [
        f"pairs.csv holds all {len(found.pairs)} comparisons at equal budgets: paired sign-flip "
        f"tests over problems, Holm's correction for their number. {apart} of them differ "
        "significantly at 5 %."
    ]
    return said + ([power.sentence(found.power)] if study.entry.measures[0].binary else [])


def _rows_of(rows: Sequence[Row], cell: Summary) -> list[Row]:
    return [r for r in rows if r["policy"] == cell.policy and r["budget"] == cell.budget]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
