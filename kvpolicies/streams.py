"""Standard output and error of the command line: any encoding, closed, full, or below a bar."""

import io
import os
import sys
from contextlib import suppress

from kvpolicies.errors import reason


def steady() -> None:
    """Makes both take any text: what their encoding lacks is written as an escape.

    A stream that was closed before the program began becomes one that leads nowhere: else its
    number would be given to the next file that is opened, and messages would go into results.
    """
    for name, errors in (
        ("stdin", "strict"),
        ("stdout", "backslashreplace"),
        ("stderr", "backslashreplace"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the program)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def say(message: str) -> None:
    """One line on standard error, in a line of its own even while a progress bar is shown."""
    with suppress(OSError):  # nobody is left to be told
        if "tqdm" in sys.modules:
            from tqdm import tqdm

            tqdm.write(f"kvpolicies: {message}", file=sys.stderr)
        else:
            print(f"kvpolicies: {message}", file=sys.stderr)
        sys.stderr.flush()


def tell(message: str) -> None:
    """A line on standard error about what takes a while."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def finish(status: int, message: str = "") -> int:
    """Writes what is left for standard output, and then the message; the exit status to give.

    Whoever reads our output may have read enough (a closed pipe): that is no failure. Output that
    is lost otherwise, on a full disk, is one.
    """
    lost = _flush()
    if lost is None:
        if message:
            say(message)
        return status
    if isinstance(lost, BrokenPipeError):
        return 0
    say(message or f"standard output: {reason(lost)}")
    return 2


def _flush() -> OSError | None:
    """What keeps standard output from being written; then what is left for it goes nowhere."""
    try:
        sys.stdout.flush()
        return None
    except OSError as error:
        # The interpreter writes what is left at its end, and would complain without words.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        return error
