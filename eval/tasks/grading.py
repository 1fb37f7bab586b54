r"""Is the final answer of one text right? Its value decides, exactly.

The answer is taken from the text of one sample and from nothing else, by the first of a task's WAYS
that finds one: the last closed `\boxed{}` (braces matched, so that `\boxed{\frac{14}{3}}` stays
whole), what follows the last `####`, the last `Answer:`, the last letter in brackets, the last
number. An empty box is an empty answer, and wrong: nothing else of the text counts then.

Values are compared (maths/): 14/3 equals \frac{14}{3} and 4 2/3, {1, 2} equals {2, 1}, x < 3 equals
(-\infty, 3); a unit or thousands separators may be there or not, 50\% is both 50 and 0.5. All of an
answer is read, or it equals nothing but its own spelling. No error and no delay gets out: what
cannot be decided within five seconds is wrong.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import regex

from kvpolicies.errors import UserError, caution, nearest
from kvpolicies.eval.tasks.maths.deciding import equal

SECONDS = 2.0
"""For a regular expression of a task's on one text."""
# A minus right after a digit or a bracket is a subtraction, no sign.
_NUMBER = re.compile(r"(?:(?<![\d)\]])[-−])?(?:\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?|\.\d+)", re.ASCII)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER = re.compile(r"(?i:\banswer)(?:\s+is)?\s*(?:\*\*|__)?\s*:\s*(?:\*\*|__)?[ \t]*([^\n]*)")
_BRACKETED = re.compile(r"\(([A-Z])\)")


def last_box(text: str) -> str | None:
    r"""The contents of the last closed `\boxed{...}`, or None. Nested boxes give the outer one."""
    found, at = None, 0
    while match := _BOX.search(text, at):
        end = _closing_brace(text, match.end())
        if end is None:  # never closed, or the text was cut off: not an answer
            at = match.end()
        else:
            found, at = text[match.end() : end], end + 1
    return found


def after_hashes(text: str) -> str | None:
    """The line after the last `####`, as in gsm8k's own solutions."""
    if "####" not in text:
        return None
    lines = text.rsplit("####", 1)[1].strip().splitlines()
    return lines[0] if lines else ""


def answer_line(text: str) -> str | None:
    """What follows the last "Answer:" (or "answer is:") on its line."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def last_bracketed(text: str) -> str | None:
    """The last capital letter in round brackets."""
    found = _BRACKETED.findall(text)
    return found[-1] if found else None


def last_number(text: str) -> str | None:
    """The last number, without thousands separators."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").replace("−", "-") if found else None


WAYS: dict[str, Callable[[str], str | None]] = {
    "boxed": last_box,
    "hashes": after_hashes,
    "answer_line": answer_line,
    "bracketed": last_bracketed,
    "last_number": last_number,
}
"""How an answer may be found in a text; a regular expression with one group is another way."""

MATHS = ("boxed", "hashes")


def candidates(text: str, ways: Sequence[str]) -> Iterator[str]:
    """What each way finds in `text`, in the order of `ways`."""
    for way in ways:
        found = WAYS[way](text) if way in WAYS else last_group(way, text)
        if found is not None:
            yield found.strip()


def check_way(way: str) -> None:
    """Raises UserError unless `way` is one of WAYS or a regular expression with one group."""
    if way in WAYS:
        return
    if "(" not in way:
        known = nearest(way, list(WAYS))
        raise UserError(f"{way!r}: {known}, or a regular expression with one group")
    try:
        groups = regex.compile(way).groups
    except regex.error as error:
        raise UserError(f"{way!r}: no regular expression ({error})") from None
    if groups != 1:
        raise UserError(
            f"{way!r}: {groups} groups; a regular expression needs one, around the answer "
            "(others are written (?:...))"
        )


def last_group(expression: str, text: str) -> str | None:
    """What the group holds in the last match; a search that takes too long has found nothing."""
    try:
        matches = regex.finditer(expression, text, timeout=SECONDS)
        found = [match[1] for match in matches if match[1] is not None]
    except TimeoutError:
        caution(
            f"extract {expression!r} took more than {SECONDS:g} s on a text of {len(text)} "
            "characters, and found nothing there"
        )
        return None
    return found[-1] if found else None


def extract_answer(text: str, ways: Sequence[str] = MATHS) -> str | None:
    """The final answer that `text` gives, as LaTeX or a plain number; None if it gives none."""
    return next(candidates(text, ways), None)


def is_correct(text: str, answer: str, ways: Sequence[str] = MATHS) -> bool:
    """True if the final answer in `text` has the value of `answer`, LaTeX or gsm8k's `#### 18`."""
    given = extract_answer(text, ways)
    if not given:
        return False
    wanted = extract_answer(answer) or answer
    return equal(wanted, given)


def ends_in_loop(tokens: Sequence[int], *, longest_period: int = 64, repeats: int = 4) -> bool:
    """True if `tokens` end in one block (up to `longest_period` long) said `repeats` times."""
    for period in range(1, min(longest_period, len(tokens) // repeats) + 1):
        tail = tokens[-period * repeats :]
        if all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return True
    return False


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the `}` that closes the brace opened just before `start`."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":  # an escaped brace, as in \{1, 2\}, is no brace
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1
    return None
