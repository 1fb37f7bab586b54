"""Answers deciding.py's questions: READY, then for a line of JSON [wanted, given] "1" or "0".

For each question it sets alarms that it does not handle, so that the kernel ends it whatever it is
in the middle of, also if nobody is left to do so.
"""

import contextlib
import json
import resource
import signal
import sys

READY = b"ready\n"
_PATIENCE = 12
"""How many times longer it may take on the clock: others may need the processor."""
_TO_START = 120
_MEMORY = 2 << 30


def main(seconds: float) -> None:
    """Until there are no more questions.

    Args:
        seconds: processor time for one.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # a system without this limit, or a lower one
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, _TO_START)
    from kvpolicies.eval.tasks.maths.algebra import Algebra
    from kvpolicies.eval.tasks.maths.equality import same
    from kvpolicies.eval.tasks.maths.reading import read

    engine = Algebra()
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * seconds)
        try:
            wanted, given = map(read, json.loads(line))
            verdict = wanted is not None and given is not None and same(wanted, given, engine)
        except Exception:  # whatever sympy raises; nothing that it cannot decide is equal
            verdict = False
        print(int(verdict), flush=True)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
