"""What is meant for a user's eyes: the one exception, and the one warning."""

import warnings
from collections.abc import Sequence


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

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"
