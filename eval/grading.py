r"""Is the final answer of one text right? math-verify decides, on what this file extracts.

The answer is taken from the text of one sample and from nothing else: the last closed `\boxed{}`
(braces matched, so that `\boxed{\frac{14}{3}}` stays whole), else what follows the last `####`,
else, where a task allows it, the last number. math-verify compares values: 14/3 equals
\frac{14}{3}, {1, 2} equals {2, 1}, units and thousands separators are dropped.

No exception of the parser or of sympy, and no timeout, gets out: such an answer counts as wrong.
"""

import logging
import re
import threading
from collections.abc import Sequence

_SECONDS = 5  # for one parse or comparison
# A minus right after a digit or a bracket is a subtraction, no sign.
_NUMBER = re.compile(r"(?:(?<![\d)\]])[-−])?(?:\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?|\.\d+)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


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


def extract_answer(text: str, *, last_number: bool) -> str | None:
    """The final answer that `text` gives, as LaTeX or a plain number; None if it gives none."""
    boxed = last_box(text)
    if boxed is not None:
        return boxed.strip()
    if "####" in text:
        lines = text.rsplit("####", 1)[1].strip().splitlines()
        return lines[0].strip() if lines else None
    if last_number and (numbers := _NUMBER.findall(text)):
        return numbers[-1].replace(",", "").replace("−", "-")
    return None


def is_correct(text: str, answer: str, *, last_number: bool = False) -> bool:
    """True if the final answer in `text` has the value of `answer` (LaTeX, or gsm8k's `#### 18`).

    `last_number`: without a box or `####`, the last number of the text counts as the answer.
    """
    given = extract_answer(text, last_number=last_number)
    if not given:
        return False
    wanted = extract_answer(answer, last_number=False) or answer
    return same_value(wanted, given)


def same_value(wanted: str, given: str) -> bool:
    """True if math-verify holds the two expressions for equal."""
    if wanted.strip() == given.strip():
        return True
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    # Its timeouts are alarms, which only the main thread can set; its log would break the bars.
    in_main = threading.current_thread() is threading.main_thread()
    seconds = _SECONDS if in_main else None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    try:
        gold = parse(_as_math(wanted), parsing_timeout=seconds)  # type: ignore[arg-type]
        guess = parse(_as_math(given), parsing_timeout=seconds)  # type: ignore[arg-type]
        return bool(gold and guess and verify(gold, guess, timeout_seconds=seconds))
    except (Exception, TimeoutException):
        return False


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


def _as_math(expression: str) -> str:
    return f"${expression.strip().strip('$')}$"
