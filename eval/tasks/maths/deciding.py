"""Whether two answers are equal, in bounded time, from any thread.

Plain numbers and equal readings are decided here and now. What takes algebra is asked of one child
process, kept for the next question: sympy is never imported here, and an answer such as 9^9^9^9
ends a child instead of a study. The child bounds its own time and memory (child.py); its end is
an answer: not equal.
"""

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading

from kvpolicies.errors import UserError
from kvpolicies.eval.tasks.maths.arithmetic import Arithmetic, Undecided
from kvpolicies.eval.tasks.maths.child import READY
from kvpolicies.eval.tasks.maths.equality import same
from kvpolicies.eval.tasks.maths.reading import read
from kvpolicies.eval.tasks.maths.tokens import LONGEST, key

# The same modules as here, wherever they come from; nothing of the current folder by accident.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from kvpolicies.eval.tasks.maths.child import main; "
    "main(float(sys.argv[1]))"
)


@functools.lru_cache(maxsize=1 << 14)
def equal(wanted: str, given: str) -> bool:
    """Whether the answer `given` is right where `wanted` is, both LaTeX or plain text.

    What cannot be read for certain, all of it, is equal to nothing but its own spelling.
    """
    if wanted.strip() == given.strip():
        return True
    if max(len(wanted), len(given)) > LONGEST:
        return False
    if key(wanted) == key(given):
        return True
    try:
        ours, theirs = read(wanted), read(given)
        return ours is not None and theirs is not None and same(ours, theirs, Arithmetic())
    except Undecided:
        return _CHILD.equal(wanted, given)
    except Exception:  # no answer ends a study; what cannot be compared is not equal
        return False


class Child:
    """The process that knows algebra; started at the first question, and again after each end.

    Args:
        seconds: processor time that it may spend on one question.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self.forget()

    def forget(self) -> None:
        """What a fork must do: neither the lock nor the process is its own."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, wanted: str, given: str) -> bool:
        """The child's verdict; False if it ends over it."""
        with self._lock:
            if self._process and self._process.poll() is not None:
                self._end()  # while nothing was asked of it
            process = self._process or self._start()
            try:
                verdict = _ask(process, json.dumps([wanted, given]))
            except BaseException:  # interrupted: its late answer must not be the next one's
                self._end()
                raise
            if not verdict:
                self._end()
            return verdict == b"1\n"

    def close(self) -> None:
        """Ends the child, if there is one."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self.seconds), *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )  # fmt: skip
        try:
            assert process.stdout
            if process.stdout.readline() != READY:
                raise UserError("answers cannot be compared: does `python -c 'import sympy'` work?")
        except BaseException:
            self._end()
            raise
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes its pipes and waits for it
            pass


def _ask(process: subprocess.Popen[bytes], question: str) -> bytes:
    """The child's line; empty if it has ended."""
    assert process.stdin and process.stdout
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(question.encode() + b"\n")
        process.stdin.flush()
        return process.stdout.readline()
    return b""


_CHILD = Child()
atexit.register(_CHILD.close)
os.register_at_fork(after_in_child=_CHILD.forget)
