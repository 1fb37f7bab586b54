"""A choice in words: why the winner won, why others did not, and what would change it.

Everything is read off the numbers of a `Choice`; nothing is decided here. explaining.j2 has the
words.
"""

from pathlib import Path
from typing import Any

from kvpolicies.eval.display.bytesize import size
from kvpolicies.eval.display.pages import macros
from kvpolicies.eval.select.candidates import Candidate
from kvpolicies.eval.select.decision import EQUAL, NONE, UNDECIDED, Choice
from kvpolicies.eval.select.power import Need

MOST = 4
"""Candidates that a sentence names."""
_SAID = Path(__file__).with_name("explaining.j2")


def points(share: float) -> str:
    """A share in percentage points, `2.1`, with a real minus sign."""
    text = f"{100 * share:.1f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def _say() -> Any:
    return macros(_SAID, size=size, points=points)


def sentences(choice: Choice) -> list[str]:
    """The verdict, its reasons, and what would change it."""
    if choice.verdict == NONE:
        return [_nothing(choice), *_out_of_reach(choice)]
    if choice.verdict == UNDECIDED:
        head = _unsure if choice.limits.on_accuracy else _rivalled
        return [*head(choice), *_out_of_reach(choice)]
    if choice.limits.on_accuracy:
        return [_cheapest(choice), *_tie(choice), *_threshold_moved(choice), _memory_moved(choice)]
    best = _say().best(choice.limits, choice.winner, len(choice.admissible))
    return [best, *_tie(choice), *_out_of_reach(choice), _memory_moved(choice)]


def faults(choice: Choice, candidate: Candidate) -> list[str]:
    """What a candidate fails, and by how much; empty if nothing."""
    found, limit = [], choice.limits.memory
    if limit is not None and not choice.fits(candidate):
        found.append(_say().too_much(candidate.memory.total - limit))
    found += [_say().failed(test) for test in choice.tests[candidate.cell] if not test.passes]
    rival = next((r for r in choice.rivals if r.candidate is candidate), None)
    return found + ([_say().may_be_first(rival)] if rival else [])


def _cheapest(choice: Choice) -> str:
    winner = choice.winner
    assert winner is not None
    able = [c for c in choice.admissible if choice.passes(c)]
    second = min((c for c in able if c is not winner), key=lambda c: c.held, default=None)
    worst = min(choice.tests[winner.cell], key=lambda test: test.slack, default=None)
    return _say().cheapest(choice.limits, winner, len(able), second, worst)


def _tie(choice: Choice) -> list[str]:
    if not choice.equals or choice.winner is None:
        return []
    more, percent = len(choice.equals) - MOST, f"{100 * EQUAL:.0f}"
    return [_say().tie(choice.winner, choice.equals[:MOST], more, percent)]


def _threshold_moved(choice: Choice) -> list[str]:
    """Who would win under a stricter and under a looser constraint, and with more data."""
    winner = choice.winner
    assert winner is not None
    said, slack = [], choice.slack(winner)
    firmer = [c for c in choice.admissible if choice.slack(c) > slack and choice.passes(c)]
    if choice.tests[winner.cell]:
        then = min(firmer, key=lambda c: c.held, default=None)
        said.append(_say().stricter(slack, then))
    cheaper = [c for c in choice.admissible if c.held < winner.held and not choice.passes(c)]
    if cheaper:
        near = max(cheaper, key=lambda c: (round(choice.slack(c), 6), -c.held))
        said.append(_say().looser(choice.slack(near), near))
    said += [
        _say().passes_by_estimate(c, lacking)
        for c in sorted(cheaper, key=lambda c: c.held)[:MOST]
        if choice.plausible(c) and (lacking := _most(choice, c)) is not None
    ]
    return said


def _memory_moved(choice: Choice) -> str:
    winner = choice.winner
    assert winner is not None
    total = winner.memory.total
    able = [c for c in choice.admissible if choice.passes(c) and c.memory.total < total]
    if choice.limits.on_accuracy:
        then = able[0] if able else None
    else:
        then = max(able, key=lambda c: c.mean.accuracy.value, default=None)
    return _say().less_memory(total, then, choice.limits.on_accuracy)


def _out_of_reach(choice: Choice) -> list[str]:
    """Candidates that more memory would admit, and that would then be chosen or lead."""
    limit = choice.limits.memory
    if limit is None:
        return []
    outside = [c for c in choice.candidates if not choice.fits(c) and choice.passes(c)]
    if not choice.limits.on_accuracy:
        best = choice.winner.mean.accuracy.value if choice.winner else -1.0
        outside = [c for c in outside if c.mean.accuracy.value > best]
    if not outside:
        return []
    near = min(outside, key=lambda c: c.memory.total)
    return [_say().more_memory(near.memory.total - limit, near)]


def _nothing(choice: Choice) -> str:
    if not choice.admissible:
        near = min(choice.candidates, key=lambda c: c.memory.total)
        return _say().nothing_fits(choice.limits.memory or 0, near)

    def estimate(c: Candidate) -> float:
        return min(test.estimate - test.threshold for test in choice.tests[c.cell])

    near = max(choice.admissible, key=estimate)
    return _say().nothing_meets(choice.limits, near, estimate(near))


def _unsure(choice: Choice) -> list[str]:
    able = sorted(filter(choice.plausible, choice.admissible), key=lambda c: c.held)
    return [
        _say().unsure(choice.limits, len(able), len(choice.admissible)),
        *(_say().unsure_of(c, faults(choice, c), _most(choice, c)) for c in able[:MOST]),
    ]


def _rivalled(choice: Choice) -> list[str]:
    rivals = choice.rivals
    head = _say().rivalled(choice.winner, len(rivals), choice.limits)
    return [head, *map(_say().rivalling, rivals[:MOST])]


def _most(choice: Choice, candidate: Candidate) -> Need | None:
    """The largest need of its failed tests; None if one of them cannot be met."""
    needs = [test.need for test in choice.tests[candidate.cell] if not test.passes]
    known = [one for one in needs if one is not None]
    return max(known, key=lambda one: one.problems) if known and len(known) == len(needs) else None
