"""The grader's verdicts: a table of our own, and the answers of benchmarks against each other."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from kvpolicies.eval.tasks.maths.deciding import equal

TABLE = Path(__file__).with_name("verdicts.txt")
_LINE = re.compile(r"(.+?)\s{2,}(==|=/=)\s{2,}(.+)")
MOST_WRONG = 1 / 200
"""Share of known-wrong answers that may be judged right."""
MOST_MISSED = 1 / 40
"""Share of known-right answers that may be judged wrong: those are written in odd ways."""


def verdicts(sign: str) -> list[tuple[str, str]]:
    """(right answer, what a model wrote) of the table's lines with this sign."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    found = [_LINE.fullmatch(line) for line in lines if line and not line.startswith("#")]
    assert all(found)
    return [(match[1], match[3]) for match in found if match and match[2] == sign]


def test_known_wrong_is_not_judged_right() -> None:
    wrong = verdicts("=/=")
    assert len(wrong) >= 150
    fooled = [pair for pair in wrong if equal(*pair)]
    print(f"\nknown wrong judged right: {len(fooled)} of {len(wrong)}")
    assert not fooled and len(fooled) <= MOST_WRONG * len(wrong)


def test_known_right_is_seldom_judged_wrong() -> None:
    right = verdicts("==")
    assert len(right) >= 150
    missed = [pair for pair in right if not equal(*pair)]
    print(f"\nknown right judged wrong: {len(missed)} of {len(right)}", *missed, sep="\n")
    assert len(missed) <= MOST_MISSED * len(right)


def test_wrong_is_wrong_the_other_way_round() -> None:
    assert not [pair for pair in verdicts("=/=") if equal(*pair[::-1])]


def golds(data: Path) -> list[str]:
    """The different answers of all benchmark files."""
    files = ("math500_half", "aime24", "aime25", "gsm8k_300")
    lines = [line for f in files for line in (data / f"{f}.jsonl").read_text("utf-8").splitlines()]
    return sorted({json.loads(line)["answer"] for line in lines})


def writings(gold: str) -> list[str]:
    """`gold` as a model may write it."""
    found = [f" {gold} ", f"${gold}$", rf"\({gold}\)", f"{gold}.", rf"\displaystyle {gold}"]
    found.append(gold.replace(r"\frac", r"\dfrac").replace("(", r"\left(").replace(")", r"\right)"))
    found.append(re.sub(r"(?<=[^\\\w])-|^-", "−", gold))
    if re.fullmatch(r"\d+", gold):
        found += [f"{gold}.00", f"+{gold}", rf"{gold}\text{{ apples}}", rf"\${gold}", f"x = {gold}"]
        found += [f"{int(gold):,}", rf"\frac{{{2 * int(gold)}}}{{2}}", rf"\boxed{{{gold}}}"]
    return found


def test_every_gold_answer_is_itself_in_other_writings(data: Path) -> None:
    found = [(gold, written) for gold in golds(data) for written in writings(gold)]
    assert len(found) > 3000
    assert not [pair for pair in found if not equal(*pair)]


# Of 50,086 pairs these are equal, and rightly: padding, degrees, bases, an unknown's name.
EQUAL_GOLDS = {
    ("023", "23"), ("025", "25"), ("033", "33"), ("045", "45"), ("055", "55"), ("073", "73"),
    ("080", "80"), ("120", r"120^\circ"), ("145", r"145^\circ"), ("204_5", "54"),
    ("30", r"30^\circ"), ("36", "40_9"), ("42", "52_8"), ("5", "x=5"), ("5,600", "5600"),
    ("90", r"90^\circ"),
}  # fmt: skip


def test_different_gold_answers_differ(data: Path) -> None:
    """A sample of all pairs, and one of those that are not plain numbers."""
    every = golds(data)
    special = [gold for gold in every if not re.fullmatch(r"[\d,]+", gold)]
    draw = random.Random(0)
    pairs = {tuple(sorted(draw.sample(some, 2))) for some in (every, special) for _ in range(1000)}
    assert {pair for pair in pairs if equal(*pair)} <= EQUAL_GOLDS
