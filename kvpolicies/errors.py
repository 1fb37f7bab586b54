"""What is meant for a user's eyes: the one exception, the one warning, any failure as one line.

What a user gave may be of any length and hold anything: `shown` quotes it, `one_line` is the last
resort that whatever reaches the terminal goes through.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LONGEST = 200
"""Characters of a text of somebody else's that a message shows."""
_LONGEST_LINE = 1000


class UserError(ValueError):
    """Bad input: one line that says what, where, and what to write instead.

    The command line prints it without a traceback and exits with status 2. It is a `ValueError`,
    so library users need not import it to catch it.
    """


class Caution(UserWarning):
    """What runs, and should not be taken for more than it is; the command line prints one line."""


def caution(text: str) -> None:
    """Warns of something, once."""
    warnings.warn(text, Caution, stacklevel=2)


def nearest(word: str, known: Sequence[str]) -> str:
    """Returns a hint for the end of an error line: the known word that `word` is like, and all.

    A word that is like none of them gets no suggestion.
    """
    import difflib

    close = difflib.get_close_matches(word[:LONGEST], known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"


def cut(text: str, most: int = LONGEST) -> str:
    """`text`, or as much of its beginning as a message has room for."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def shown(value: Any) -> str:
    """`repr(value)`, cut where it is long."""
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[:LONGEST]!r}... ({len(value):,} characters)"
    return cut(repr(value))


def is_text(text: str) -> bool:
    """Whether it can be encoded: half of a surrogate pair, or bytes that are no UTF-8, cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def one_line(text: str) -> str:
    """A message as the terminal gets it: no line breaks or control codes, what is long cut."""
    plain = re.sub(
        r"[\x00-\x1f\x7f-\x9f]", lambda code: repr(code[0])[1:-1], " ".join(text.split())
    )
    line = re.sub(r"\S{201,}", lambda word: cut(word[0]), plain)
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} ... {line[-half:]}"


def first_line(error: BaseException) -> str:
    """The first line of what an exception of somebody else's says, or its kind; cut."""
    return cut(next(iter(str(error).strip().splitlines()), "") or type(error).__name__)


def reason(error: BaseException) -> str:
    """Why a file, a text or a template cannot be used, in a few words."""
    if isinstance(error, OSError):
        text = error.strerror or first_line(error)
        return text[:1].lower() + text[1:]
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    if isinstance(error, UnicodeEncodeError):
        return "half of a surrogate pair is no text"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return first_line(error)


@contextmanager
def rendering(what: str) -> Iterator[None]:
    """Around the rendering of a template that is not ours, such as a model's or a task's.

    A template does what its author wrote, and so raises anything.

    Raises:
        UserError: `what` cannot be rendered, and why, for any exception inside.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = reason(error)
        kind = type(error).__name__
        why = said if isinstance(error, RecursionError) or kind in said else f"{kind}: {said}"
        raise UserError(f"{what} cannot be rendered ({why})") from None


def explained(error: BaseException) -> str | None:
    """What to tell a user of any exception that follows from files, memory, texts or templates.

    None for all others: they are faults of ours, whose traceback is wanted.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        # All files have names (files.naming): what fails without one is what is printed.
        return f"{error.filename or 'standard output'}: {reason(error)}"
    if isinstance(error, UnicodeError | RecursionError):
        return f"input that cannot be used: {reason(error)}"
    kind, package = type(error).__name__, type(error).__module__.partition(".")[0]
    if package == "jinja2":
        return f"a template cannot be rendered ({kind}: {first_line(error)})"
    if package in ("safetensors", "safetensors_rust"):
        return f"a safetensors file cannot be read or written ({first_line(error)})"
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or _allocation(error):
        return f"out of memory ({first_line(error)})"
    return None


def _allocation(error: BaseException) -> bool:
    """torch has no exception of its own for the host's memory."""
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def whole(value: Any, least: int, what: str, most: int = 1 << 62) -> None:
    """Raises UserError unless an option is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{what} must be a whole number >= {least}, got {shown(value)}")
    if value > most:
        raise UserError(f"{what} must be at most {most}, got {shown(value)}")
