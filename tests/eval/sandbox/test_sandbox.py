"""The sandbox: what an answer in code may do, and what happens to one that does more."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from pathlib import Path

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.sandbox import running as sandbox
from kvpolicies.eval.sandbox import seccomp
from kvpolicies.eval.sandbox.running import Limits, run

# Time is there for a slow machine: nothing that these limits are for takes a second of it.
REFUSALS = ("PermissionError", "FileNotFoundError")
SHORT = Limits(seconds=20, memory_mb=512, output_mb=1)


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    """Skips, with the reason, where the kernel gives no isolation."""
    try:
        sandbox.check(SHORT)
    except UserError as error:
        pytest.skip(str(error))


def test_a_program_reads_its_input_and_writes_its_output() -> None:
    made = run("a, b = map(int, input().split())\nprint(a + b)", "2 40\n", SHORT)
    assert (made.status, made.output) == ("ok", "42\n")


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_standard_input_may_be_opened_by_name(name: str) -> None:
    """As honest programs do; a second time it is read from the start again."""
    source = f"""
import sys
print(open({name!r}).read().split())
print(len(open({name!r}, "rb").readlines()), sys.stdin.readline().strip(), open(0).read())
"""
    made = run(source, "2 40\n7\n", SHORT)
    assert (made.status, made.output) == ("ok", "['2', '40', '7']\n2 2 40 \n"), made.error


@pytest.mark.parametrize(
    "name", ["/dev/fd/1", "/proc/self/environ", "/proc/self/maps", "/dev/fd/9"]
)
def test_nothing_else_of_the_process_may(name: str) -> None:
    made = run(f"print(open({name!r}).read())", "", SHORT)
    assert made.status == "failed" and made.error.split(":")[0] in REFUSALS, made.error


def test_a_function_gets_arguments_and_what_it_prints_is_no_result() -> None:
    source = """
class Solution:
    def pair(self, items: List[int], name: str):
        print("debugging")
        return [name, Counter(items)[1]]
"""
    made = run(source, '[1, 1, 2]\n"x"', SHORT, function="pair")
    assert (made.status, made.output) == ("ok", '["x", 2]')
    plain = run("def twice(x):\n    return 2 * x", "21", SHORT, function="twice")
    assert plain.output == "42"


def test_the_main_guard_runs_in_programs_only() -> None:
    source = "def f():\n    return 1\nif __name__ == '__main__':\n    print('main')\n    exit()"
    assert run(source, "", SHORT).output == "main\n"
    assert run(source, "", SHORT, function="f").output == "1"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("print(", "SyntaxError"),
        ("import os\nos._exit(3)", ""),
        ("import os\nos.abort()", ""),
        ("x = [bytearray(1 << 24) for _ in range(1000)]", "MemoryError"),
        ("while True: print('x' * 1000)", "OSError"),
    ],
    ids=lambda value: value[:12],
)
def test_failures_are_named(source: str, error: str) -> None:
    made = run(source, "", SHORT)
    assert made.status == "failed" and made.error.startswith(error)
    assert len(made.output) <= 1 << 20


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\ntime.sleep(100)",
        "while True:\n    try:\n        print('x' * 9999)\n    except OSError:\n        pass",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "def f():\n    while True:\n        try:\n            f()\n        except BaseException:\n"
        "            pass\nf()",
        "import threading, time\n"
        "for _ in range(100): threading.Thread(target=time.sleep, args=(60,)).start()",
    ],
    ids=("loop", "sleep", "print", "signal", "except", "threads"),
)
def test_whoever_goes_on_is_ended(source: str) -> None:
    limits = Limits(seconds=0.5, memory_mb=2048, output_mb=1)
    assert run(source, "", limits).status == "time"


REFUSED = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "grandchild": "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()",
    "multiprocessing": "import multiprocessing as m\nm.Process(target=print).start()",
    "program": "import os, sys\nos.execv(sys.executable, [sys.executable, '--version'])",
    "new session": "import os\nos.setsid() if os.getpid() != os.getsid(0) else os.setpgid(0, 0)",
    "socket": "import socket\nsocket.socket()",
    "unix socket": "import socket\nsocket.socketpair()",
    "write": "open('file', 'w')",
    "append": "open('/dev/shm/file', 'a')",
    "make a folder": "import os\nos.mkdir('folder')",
    "memory file": "import os\nos.memfd_create('x')",
    "kill": "import os\nos.kill(os.getppid(), 9)",
    "kill all": "import os\nos.kill(-1, 9)",
    "kill by owner": "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "limits": "import resource as r\nr.setrlimit(r.RLIMIT_CPU, (99, 99))",
    "limits of the parent": "import os, resource as r\nr.prlimit(os.getppid(), 9, (1, 1))",
    "root": "import os\nos.chroot('.')",
    "chmod": "import os\nos.chmod('.', 0o777)",
    "priority": "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_kernel_refuses(what: str) -> None:
    made = run(REFUSED[what], "", SHORT)
    assert made.status == "failed"
    assert made.error.split(":")[0] in ("PermissionError", "OSError", "ValueError"), made.error


def test_a_server_of_ours_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        made = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", "", SHORT)
    assert made.status == "failed" and "PermissionError" in made.error


def test_nothing_is_written_anywhere(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("mine")
    source = f"""
import os
for action in (
    lambda: open({str(target)!r}, 'w'), lambda: os.remove({str(target)!r}),
    lambda: os.rename({str(target)!r}, 'x'), lambda: os.truncate({str(target)!r}, 0),
    lambda: os.symlink('a', 'b'), lambda: os.open('big', os.O_RDWR | os.O_CREAT),
):
    try:
        action()
        print('did it')
    except OSError:
        pass
print(os.listdir('.'), sorted(os.environ))
"""
    made = run(source, "", SHORT)
    assert made.status == "ok"
    folder, names = made.output.strip().split("] [")
    assert folder == "[" and "KEY" not in names and "HOME" not in names
    assert target.read_text() == "mine" and list(tmp_path.iterdir()) == [target]


def test_files_of_the_user_cannot_be_read(tmp_path: Path) -> None:
    if not _has_landlock():
        pytest.skip("this kernel has no Landlock")
    secret = tmp_path / "secret"
    secret.write_text("token")
    for path in (str(secret), "/etc/passwd", f"/proc/{os.getpid()}/environ"):
        made = run(f"print(open({path!r}).read())", "", SHORT)
        assert made.status == "failed" and "PermissionError" in made.error, path


def _has_landlock() -> bool:
    import ctypes

    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1


def test_packages_threads_and_deep_recursion_work() -> None:
    source = """
import threading, numpy
threading.stack_size(1 << 26)
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)
def main():
    print(int(numpy.arange(10).sum()), depth(20_000))
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
    made = run(source, "", Limits(seconds=6, memory_mb=1024))
    assert (made.status, made.output) == ("ok", "45 20000\n"), made.error


def test_the_order_of_sets_is_the_same_every_time() -> None:
    source = "print(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert run(source, "", SHORT).output == run(source, "", SHORT).output


def test_a_grandchild_does_not_survive_without_isolation_either(tmp_path: Path) -> None:
    """Limits alone: the process group goes, whoever of it is left."""
    mark = tmp_path / "pid"
    source = f"""
import os, time
if os.fork() == 0:
    open({str(mark)!r}, 'w').write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists({str(mark)!r}) or not open({str(mark)!r}).read():
    time.sleep(0.01)
"""
    made = run(source, "", Limits(seconds=5, isolation="limits"))
    assert made.status == "ok", made.error
    try:
        handle = os.pidfd_open(int(mark.read_text()))
    except ProcessLookupError:
        return
    with os.fdopen(handle) as process:  # readable once it has ended
        assert select.select([process], [], [], 30)[0]


def test_no_isolation_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "supported", lambda: False)
    with pytest.raises(UserError, match="isolation: limits") as caught:
        sandbox.check(SHORT)
    assert "\n" not in str(caught.value)
    sandbox.check(Limits(isolation="limits"))


def test_a_filter_that_lets_things_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)  # allow
    monkeypatch.setattr(seccomp, "program", lambda: everything)
    with pytest.raises(UserError, match="it allows what it must not: sockets"):
        sandbox.check(SHORT)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_lands_inside(machine: str) -> None:
    code = seccomp.program(machine)
    lines = [struct.unpack("<HBBI", code[i : i + 8]) for i in range(0, len(code), 8)]
    assert len(lines) < 4096  # the kernel's limit
    for at, (operation, yes, no, _) in enumerate(lines):
        if operation in (0x15, 0x45):
            assert at + 1 + max(yes, no) < len(lines)
    assert lines[-1][0] == 0x06 and lines[-1][3] == 0x00050001


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"seconds": 0}, "seconds"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"isolation": "limit"}, "did you mean"),
    ],
)
def test_bad_limits(values: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Limits(**values)
