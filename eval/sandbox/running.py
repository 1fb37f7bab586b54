"""Runs code that a model wrote: in a process of its own, with nothing, and never for long.

The process can compute, read its standard input and the interpreter's own files, and write to its
standard output. Limits: CPU time, wall time, address space, size of output, open files, threads.
Denied by a seccomp filter (seccomp.py): every network call, new processes, other programs, signals
to anyone, opening any file for writing or making one, raising its limits. Where the kernel has
Landlock (Linux 5.13 on), files outside of the interpreter and the system's libraries cannot be read
either, `/proc` and home folders included. It has an empty environment and an empty working folder,
and its process group is killed at the limit, and when the study dies.

What this does not protect from: a fault in the kernel or the processor (side channels); reading
what the user may read, on kernels without Landlock; reading the interpreter's packages; using one
CPU up to its limit, and the memory of up to `memory_mb`; an answer that forges its own result, by
writing to its output what the right answer would have returned (it is never told that one). For
code by an adversary and not by a model, use a virtual machine.

`isolation: limits` keeps limits and the kill, and drops filter and Landlock: any machine with POSIX
runs it, and an answer can then do all that the user can: write, connect, survive by leaving
its process group. It is for a throw-away container.
"""

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvpolicies.errors import UserError
from kvpolicies.eval.sandbox import seccomp
from kvpolicies.options import check_options, option

ISOLATIONS = ("required", "limits")
_CHILD = Path(__file__).with_name("child.py")
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null",
           "/dev/urandom")  # fmt: skip
_MOST_THREADS = 64
_LOOK_EVERY = 0.05  # seconds between two looks at the number of threads


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    seconds: float = option(
        6.0, "CPU time of one test; wall time may be twice as much", above=0, most=3600
    )
    memory_mb: int = option(1024, "address space, the interpreter included", least=64)
    output_mb: int = option(16, "standard output", least=1)
    isolation: str = option(
        "required", "required, or limits: see the top of sandbox.py", choices=ISOLATIONS
    )

    def __post_init__(self) -> None:
        check_options(self)

    def wall(self) -> float:
        """Seconds on the clock: a busy machine slows an honest answer, a sleeper is ended."""
        return 2 * self.seconds + 2

    def resources(self) -> dict[str, int]:
        """Values by their names in the module `resource`."""
        found = {
            "RLIMIT_CPU": math.ceil(self.seconds),
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": self.output_mb << 20,
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": 64,
        }
        if self.isolation == "limits":  # counts all of a user's threads, and never root's
            found["RLIMIT_NPROC"] = 512
        return {name: value for name, value in found.items() if hasattr(resource, name)}


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    status: str
    """"ok", "failed" (it raised, was refused something it needs, or ran out of memory), "time"."""
    output: str
    """Standard output; of a function call, its result as JSON."""
    error: str
    """The last line of standard error, in short."""


def run(source: str, stdin: str, limits: Limits, function: str = "") -> Outcome:
    """Runs `source` on `stdin`; the caller has called `check` once before.

    Args:
        function: call this function (or method of the class `Solution`) with one JSON argument a
            line of `stdin`; "" runs the source as a program.
    """
    job = {
        "source": source,
        "function": function,
        "limits": limits.resources(),
        "filter": seccomp.program().hex() if limits.isolation == "required" else "",
    }
    with tempfile.TemporaryDirectory(prefix="answer-") as folder, contextlib.ExitStack() as files:
        job["readable"] = [folder, *_interpreter(), *_SYSTEM]
        told, given, out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        _fill(told, json.dumps(job))
        _fill(given, stdin)
        process = subprocess.Popen(
            [sys.executable, "-s", "-B", str(_CHILD), str(told.fileno())],
            stdin=given, stdout=out, stderr=err, cwd=folder, env=_environment(),
            pass_fds=(told.fileno(),), start_new_session=True,
        )  # fmt: skip
        with _ended(process):
            in_time = _wait(process, limits.wall())
        code = process.returncode
        late = not in_time or code in (-signal.SIGXCPU, -signal.SIGKILL)
        status = "ok" if code == 0 else "time" if late else "failed"
        return Outcome(status, _text(out), _last_line(_text(err)))


def check(limits: Limits) -> None:
    """Raises UserError unless this machine isolates as `limits` asks, which is tried, not assumed.

    Call it before long work begins.
    """
    if limits.isolation == "limits":
        return
    reason = ""
    if not sys.platform.startswith("linux") or not seccomp.supported():
        reason = "it needs Linux on x86-64 or arm64"
    else:
        found = run(_PROBE, "", limits)
        if found.status != "ok":
            reason = found.error or found.status
        elif found.output.strip():
            reason = f"it allows what it must not: {found.output.strip()}"
    if reason:
        raise UserError(
            f"answers in code cannot be run isolated here ({reason}); on a machine that may be "
            "lost, a task file with 'sandbox: {isolation: limits}' runs them with limits alone"
        )


# Prints the names of what it can do and should not.
_PROBE = """
import os, socket, sys
def can(name, action):
    try:
        action()
        print(name)
    except OSError:
        pass
can("sockets", socket.socket)
can("processes", lambda: os.fork() or os._exit(0))
can("programs", lambda: os.execv(sys.executable, ["python", "-c", "print('programs')"]))
can("signals", lambda: os.kill(os.getppid(), 0))
can("writing", lambda: open("file", "w"))
"""


def _interpreter() -> list[str]:
    paths = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    return sorted(path for path in paths if path not in ("", "/"))


def _environment() -> dict[str, str]:
    """Nothing of ours: one thread, one order of sets, text as UTF-8."""
    return {
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _wait(process: subprocess.Popen, seconds: float) -> bool:
    """Whether it ended by itself in time, and with few threads at any look."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            process.wait(_LOOK_EVERY)
            return True
        except subprocess.TimeoutExpired:
            if _threads(process.pid) > _MOST_THREADS:
                return False
    return False


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # no /proc, or it has just ended
        return 0


@contextlib.contextmanager
def _ended(process: subprocess.Popen) -> Iterator[None]:
    """On leaving, nothing of its process group lives, whatever happened."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", errors="replace"))
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def _text(file: IO[bytes]) -> str:
    # The child shares the offset and moved it.
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else ""
