"""Inside the sandbox: gives up rights and resources, then runs one program. Standard library only.

`sandbox.run` starts this file as a script, with the number of an open file that holds the job; it
is never imported. Standard input and output are files already. From `confine` on nothing can be
undone: the program that is run has no way back to what this process was.
"""

import sys

sys.path[:] = [p for p in sys.path if p not in ("", __file__.rpartition("/")[0])]

import contextlib  # noqa: E402
import ctypes  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_SIGKILL = 9

# What LiveCodeBench puts before an answer: all names of these, and the modules themselves.
_STARS = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
).split()


def limit(limits: dict[str, int]) -> None:
    """Sets the resource limits, soft and hard, by the names of the module `resource`."""
    for name, value in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))


def confine(program: bytes, readable: list[str]) -> None:
    """Takes away everything but computing, reading `readable` and writing to open files.

    Args:
        program: the seccomp filter; empty for none.
        readable: folders and files that may be read, where the kernel has Landlock (5.13 on).

    Raises:
        OSError: the kernel refuses the filter.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)  # the study was killed: so is its answer
    if not program:
        return
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _confine_reading(libc, readable)
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    whole = Program(len(program) // 8, ctypes.addressof(code))
    done = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(whole), 0, 0)
    _check(done, "PR_SET_SECCOMP")


def _confine_reading(libc: ctypes.CDLL, readable: list[str]) -> None:
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return
    handled = ctypes.c_uint64((1 << 13) - 1)  # every right of version 1: read, write, make, ...
    rules = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    _check(rules, "landlock")

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _layout_ = "ms"
        _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))

    # Standard input is an open file; named /dev/stdin it is opened anew, and found through here.
    for path in (*readable, "/proc/self/fd/0"):
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        rule = Beneath(rights, parent)
        _check(libc.syscall(_LANDLOCK_ADD, rules, 1, ctypes.byref(rule), 0), f"landlock {path}")
        os.close(parent)
    _check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prelude() -> dict[str, object]:
    """The names that an answer may take for granted."""
    import importlib

    names: dict[str, object] = {}
    for module in map(importlib.import_module, _STARS):
        public = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        names |= {name: getattr(module, name) for name in public if hasattr(module, name)}
    return names | {name: sys.modules[name] for name in _STARS if name != "datetime"}


def run(source: str, function: str) -> None:
    """Runs a program on standard input, or calls one function with its lines of JSON.

    Args:
        source: Python.
        function: its name, in the class `Solution` if there is one; "" runs a program.
    """
    names = {**prelude(), "__name__": "answer" if function else "__main__"}
    sys.setrecursionlimit(50_000)
    if not function:
        exec(compile(source, "answer.py", "exec"), names)
        return
    arguments = [json.loads(line) for line in sys.stdin.read().split("\n") if line.strip()]
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what it prints is no result
    exec(compile(source, "answer.py", "exec"), names)
    holder = names.get("Solution")
    call = getattr(holder(), function) if callable(holder) else names[function]
    json.dump(call(*arguments), results)
    results.close()


def main() -> int:
    """Reads the job, gives up what it says, runs it; 0 unless the program raises."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job = json.loads(file.read())
    limit(job["limits"])
    confine(bytes.fromhex(job["filter"]), job["readable"])
    with contextlib.suppress(SystemExit):  # an answer may leave by exit()
        run(job["source"], job["function"])
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
