"""What a study shows, in plain sentences made from its numbers alone.

Two policies differ significantly only if the interval of their paired difference leaves zero out
and a paired sign-flip test agrees; where the plain intervals overlap that is said, since
overlapping intervals neither prove nor rule out a difference between cells that saw the same
problems. What is said is computed here; findings.j2 has the words.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpolicies.eval.display.pages import macros
from kvpolicies.eval.report.analysis import Analysis
from kvpolicies.eval.stats import intervals as stats
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.eval.study import controls
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import Summary
from kvpolicies.eval.tasks.measures import Measure, Row

FEW = 30  # problems
LITTLE = 0.3  # of what full gets right
ALPHA = 0.05
_SAID = Path(__file__).with_name("findings.j2")


def sentences(study: Study, summaries: Sequence[Summary], rows: Sequence[Row]) -> list[str]:
    """The summary of a study: full first, one sentence group a budget, then the caveats."""
    measure, say = study.entry.measures[0], macros(_SAID)
    full = next((cell for cell in summaries if cell.is_full), None)
    said = []
    if full:
        little = full.values[measure.key].value < LITTLE
        said.append(say.reference(study, full, measure, little))
    for budget in study.budgets:
        here = [c for c in summaries if c.budget == budget and not c.is_full]
        cells = [c for c in here if not c.lookahead and not c.beyond]
        if cells:
            said.append(_at_budget(study, budget, cells, full, rows))
        others = [cell for cell in here if cell not in cells]
        said += [say.no_contestant(cell, measure, study.entry.forced) for cell in others]
        said += _controlled(measure, budget, cells)
    return [*said, *_caveats(summaries)]


def _at_budget(
    study: Study, budget: str, cells: list[Summary], full: Summary | None, rows: Sequence[Row]
) -> str:
    measure, say = study.entry.measures[0], macros(_SAID)
    sign = 1 if measure.higher_is_better else -1
    ranked = sorted(cells, key=lambda c: -sign * c.values[measure.key].value)
    best = ranked[0]
    top = best.values[measure.key].value
    level = [c.policy for c in ranked if c.values[measure.key].value == top]
    text = say.best_at(budget, best, level, measure)
    if full and measure.against_full:
        near = [c.policy for c in cells if not c.differences[measure.key].excludes_zero]
        others = [name for name in near if name != best.policy]
        text += say.to_full(best.differences[measure.key], others, measure)
    rest = [cell for cell in ranked if cell.policy not in level]
    return text + say.to_others(best, *_beside(study, best, rest, rows))


def _beside(
    study: Study, best: Summary, rest: list[Summary], rows: Sequence[Row]
) -> tuple[list[str], list[str], list[str]]:
    """Who is behind the best, who is not shown to be, and whose interval overlaps with its own."""
    measure, mine = study.entry.measures[0], _rows_of(rows, best)
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
    return behind, close, overlapping


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
    if behind or level:
        reached = {measure.show(c.controls[controls.MEMORY].values[measure.key]) for c in cells}
        one = reached.pop() if len(reached) == 1 and measure.percent else None
        yield macros(_SAID).stopping(budget, one, level, behind)


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
        yield macros(_SAID).longer(budget, ahead)
    if short:
        yield macros(_SAID).shorter(budget, short)


def _better_by(measure: Measure, cell: Summary, name: str) -> Interval:
    """The cell minus its control, above 0 where the cell is the better one."""
    gap = cell.controls[name].differences[measure.key]
    return gap if measure.higher_is_better else Interval(-gap.value, -gap.high, -gap.low)


def _caveats(summaries: Sequence[Summary]) -> Iterator[str]:
    say = macros(_SAID)
    yield say.held(sum(c.over_budget for c in summaries), any(c.beyond for c in summaries))
    looping = [cell for cell in summaries if cell.looping > 0 and not cell.lookahead]
    if looping:
        yield say.repeating(max(looping, key=lambda c: c.looping))
    problems = max((cell.problems for cell in summaries), default=0)
    yield say.intervals(problems, problems < FEW)


def compared(study: Study, found: Analysis) -> list[str]:
    """All comparisons after their correction, and how small a difference could have been told."""
    if not found.pairs:
        return []
    say, apart = macros(_SAID), sum(pair.told_apart for pair in found.pairs)
    said = [say.pairs(len(found.pairs), apart)]
    return said + ([say.told(found.power)] if study.entry.measures[0].binary else [])


def _rows_of(rows: Sequence[Row], cell: Summary) -> list[Row]:
    return [r for r in rows if r["policy"] == cell.policy and r["budget"] == cell.budget]
