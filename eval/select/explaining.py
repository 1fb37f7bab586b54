"""A choice in words: why the winner won, why others did not, and what would change it.

Everything is read off the numbers of a `Choice`; nothing is decided here.
"""

from collections.abc import Sequence

from kvpolicies.eval.display.bytesize import size
from kvpolicies.eval.select.candidates import Candidate
from kvpolicies.eval.select.decision import EQUAL, NONE, UNDECIDED, BoundTest, Choice
from kvpolicies.eval.select.power import Need

MOST = 4
"""Candidates that a sentence names."""


def points(share: float) -> str:
    """A share in percentage points, `2.1`, with a real minus sign."""
    text = f"{100 * share:.1f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def sentences(choice: Choice) -> list[str]:
    """The verdict, its reasons, and what would change it."""
    if choice.verdict == NONE:
        return [_nothing(choice), *_out_of_reach(choice)]
    if choice.verdict == UNDECIDED:
        head = _unsure if choice.limits.on_accuracy else _rivalled
        return [*head(choice), *_out_of_reach(choice)]
    if choice.limits.on_accuracy:
        return [_cheapest(choice), *_tie(choice), *_threshold_moved(choice), _memory_moved(choice)]
    return [_best(choice), *_tie(choice), *_out_of_reach(choice), _memory_moved(choice)]


def faults(choice: Choice, candidate: Candidate) -> list[str]:
    """What a candidate fails, and by how much; empty if nothing."""
    found = []
    limit = choice.limits.memory
    if limit is not None and not choice.fits(candidate):
        found.append(f"memory: {size(candidate.memory.total - limit)} too much")
    for test in choice.tests[candidate.cell]:
        if not test.passes:
            found.append(_failed(test))
    rival = next((r for r in choice.rivals if r.candidate is candidate), None)
    if rival is not None:
        found.append(f"may be better than the first by {points(rival.upper)} points")
    return found


def _failed(test: BoundTest) -> str:
    short = f"{points(-test.slack)} points short"
    if test.kind == "loss":
        text = (
            f"{test.bench}: may lose {points(-test.bound)} points, "
            f"{points(-test.threshold)} allowed: {short}"
        )
    else:
        text = (
            f"{test.bench}: accuracy sure to {points(test.bound)} % only, "
            f"{points(test.threshold)} % asked: {short}"
        )
    return text + (" (its estimate passes)" if test.plausible else "")


def _constraint(choice: Choice) -> str:
    said = []
    if (least := choice.limits.least_accuracy) is not None:
        said.append(f"an accuracy of at least {points(least)} %")
    if (loss := choice.limits.largest_loss) is not None:
        said.append(f"a loss of at most {points(loss)} points against full")
    if (memory := choice.limits.memory) is not None:
        said.append(f"{size(memory)} of memory")
    return " and ".join(said)


def _names(candidates: Sequence[Candidate]) -> str:
    more = len(candidates) - MOST
    text = ", ".join(c.label for c in candidates[:MOST])
    return text + (f" and {more} more" if more > 0 else "")


def _cheapest(choice: Choice) -> str:
    winner = choice.winner
    assert winner is not None
    able = [c for c in choice.admissible if choice.passes(c)]
    others = [c for c in sorted(able, key=lambda c: c.held) if c is not winner]
    text = f"{winner.label} wins: with {_constraint(choice)} asked for, "
    if not others:
        text += "it alone meets that with confidence on every task"
    else:
        text += (
            f"{len(able)} candidates meet that with confidence on every task, and its cache "
            f"and state take the fewest bytes, {size(winner.held)} (next: "
            f"{others[0].label}, {size(others[0].held)})"
        )
    tests = choice.tests[winner.cell]
    if not tests:
        return text + "; full loses nothing against itself."
    worst = min(tests, key=lambda test: test.slack)
    sure = (
        f"it loses at most {points(-worst.bound)} points"
        if worst.kind == "loss"
        else f"its accuracy is at least {points(worst.bound)} %"
    )
    return f"{text}. On {worst.bench}, its worst task, {sure} with confidence."


def _best(choice: Choice) -> str:
    winner = choice.winner
    assert winner is not None
    rest = len(choice.admissible) - 1
    asked = f"Of {rest + 1} candidates that fit into {size(choice.limits.memory or 0)}, "
    if not rest:
        return f"{winner.label} wins: it alone fits into {size(choice.limits.memory or 0)}."
    return (
        f"{winner.label} wins: {asked[0].lower() + asked[1:]}it is the most accurate, and none "
        f"of the others is better by more than {points(choice.limits.tolerance)} points, with "
        "confidence."
    )


def _tie(choice: Choice) -> list[str]:
    if not choice.equals or choice.winner is None:
        return []
    return [
        f"{_names(choice.equals)} would do as well (all constraints met, bytes within "
        f"{100 * EQUAL:.0f} %): {choice.winner.label} was taken by the tie-break, which is "
        "accuracy, then bytes, then name."
    ]


def _threshold_moved(choice: Choice) -> list[str]:
    """Who would win under a stricter and under a looser constraint, and with more data."""
    winner = choice.winner
    assert winner is not None
    said, slack = [], choice.slack(winner)
    firmer = [c for c in choice.admissible if choice.slack(c) > slack and choice.passes(c)]
    if choice.tests[winner.cell]:
        then = min(firmer, key=lambda c: c.held, default=None)
        whose = f"{then.label} ({size(then.held)})" if then else "nothing"
        said.append(
            f"Were the constraint more than {points(slack)} points stricter, {whose} "
            "would be chosen."
        )
    cheaper = [c for c in choice.admissible if c.held < winner.held and not choice.passes(c)]
    if cheaper:
        near = max(cheaper, key=lambda c: (round(choice.slack(c), 6), -c.held))
        said.append(
            f"Were it {points(-choice.slack(near))} points looser, {near.label} "
            f"({size(near.held)}) would be."
        )
    said += [
        f"{c.label} ({size(c.held)}) passes by its estimate: {_wanted(lacking)}."
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
        then = f"{able[0].label}" if able else "nothing that passes"
    else:
        best = max(able, key=lambda c: c.mean.accuracy.value, default=None)
        then = best.label if best else "nothing"
    return f"Under less than {size(total)} of memory, {then} would fit."


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
    return [
        f"With {size(near.memory.total - limit)} more memory, {near.label} (accuracy "
        f"{points(near.mean.accuracy.value)} %) would be admissible."
    ]


def _nothing(choice: Choice) -> str:
    if not choice.admissible:
        near = min(choice.candidates, key=lambda c: c.memory.total)
        limit = choice.limits.memory or 0
        return (
            f"Nothing fits into {size(limit)}: {near.label} takes the least, "
            f"{size(near.memory.total)}, {size(near.memory.total - limit)} too much."
        )

    def estimate(c: Candidate) -> float:
        return min(test.estimate - test.threshold for test in choice.tests[c.cell])

    near = max(choice.admissible, key=estimate)
    return (
        f"Nothing meets {_constraint(choice)}, not even by its estimate: {near.label} comes "
        f"nearest, {points(-estimate(near))} points short on its worst task."
    )


def _unsure(choice: Choice) -> list[str]:
    able = [c for c in choice.admissible if choice.plausible(c)]
    said = [
        f"The data cannot tell: no candidate is sure to meet {_constraint(choice)}, but "
        f"{len(able)} of {len(choice.admissible)} do by their estimates."
    ]
    for c in sorted(able, key=lambda c: c.held)[:MOST]:
        said.append(
            f"{c.label} ({size(c.held)}): {'; '.join(faults(choice, c))}; "
            f"{_wanted(_most(choice, c))}."
        )
    return said


def _rivalled(choice: Choice) -> list[str]:
    winner = choice.winner
    assert winner is not None
    said = [
        f"The data cannot tell: {winner.label} is the most accurate by its estimate "
        f"({points(winner.mean.accuracy.value)} %), but {len(choice.rivals)} others may be "
        f"better by more than {points(choice.limits.tolerance)} points."
    ]
    for rival in choice.rivals[:MOST]:
        said.append(
            f"{rival.candidate.label} ({points(rival.candidate.mean.accuracy.value)} %) "
            f"may be better by {points(rival.upper)} points; {_wanted(rival.need)}."
        )
    return said


def _most(choice: Choice, candidate: Candidate) -> Need | None:
    """The largest need of its failed tests; None if one of them cannot be met."""
    needs = [test.need for test in choice.tests[candidate.cell] if not test.passes]
    known = [one for one in needs if one is not None]
    return max(known, key=lambda one: one.problems) if known and len(known) == len(needs) else None


def _wanted(lacking: Need | None) -> str:
    if lacking is None:
        return "at these rates no number of problems would tell"
    problems, samples = lacking.measured
    text = f"about {lacking.problems:,} problems a task would tell ({problems:,} were measured"
    if samples > 1:
        more = lacking.samples
        text += (
            f"; so would {more} samples of each, not {samples}"
            if more
            else f"; no number of samples of these {problems:,} would"
        )
    return text + ")"
