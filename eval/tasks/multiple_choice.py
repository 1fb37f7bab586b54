"""Multiple choice: the order in which choices are shown, and the letter that a text settles on."""

import hashlib
import random
import re
import string
from collections.abc import Sequence

from kvpolicies.errors import UserError

# A letter by itself, perhaps in \text{} or brackets, perhaps followed by what it stands for; "A
# force" and "I think" are words.
_MARKS = r"[\s$*_({\[]*"
_LETTER = re.compile(
    rf"{_MARKS}(?:\\(?:text|textbf|mathrm|mathbf|bf|rm)\s*\{{?)?{_MARKS}"
    r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s*:?\s*\(?)?"
    r"([AI](?!\s+[a-z])|[B-Z]|[a-z](?=[\s).}$*]*$))(?![A-Za-z0-9_^'’])"
)


def shuffled(problem: str, answer: str, choices: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """(choices as they are shown, the letter of the right one).

    The order depends on the problem alone: not on its place in the data, the seed of a study, or
    how often it was drawn.

    Args:
        choices: the wrong ones, or all.

    Raises:
        UserError: fewer than two, or more than letters.
    """
    every = list(dict.fromkeys([answer, *choices]))
    if not 2 <= len(every) <= len(string.ascii_uppercase):
        raise UserError(f"expected 2 to 26 different choices, got {len(every)}")
    seed = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8], "big")
    random.Random(seed).shuffle(every)
    return tuple(every), string.ascii_uppercase[every.index(answer)]


def lettered(choices: Sequence[str]) -> str:
    """`(A) ...`, one a line."""
    letters = string.ascii_uppercase
    return "\n".join(f"({letter}) {text}" for letter, text in zip(letters, choices, strict=False))


def letter_of(given: str, count: int) -> str | None:
    r"""The letter that `given` (the contents of a box, or what follows "Answer:") starts with.

    `C`, `(C)`, `\text{C}`, `**C**` and `C: 5 m` give C; letters beyond `count` none.
    """
    found = _LETTER.match(given)
    letter = found[1].upper() if found else ""
    return letter if letter and letter in string.ascii_uppercase[:count] else None
