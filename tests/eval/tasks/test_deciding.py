"""The process that compares expressions: its deadline, its end, and who may ask it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.tasks.grading import is_correct
from kvpolicies.eval.tasks.maths import deciding
from kvpolicies.eval.tasks.maths.deciding import Child

ENDLESS = ("x", r"(x+1)^{10^9}")
RIGHT = (r"\sqrt{8}", r"2\sqrt{2}")
WRONG = (r"\sqrt{8}", r"2\sqrt{3}")


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One for all tests here: each start costs half a second."""
    made = Child(seconds=0.3)
    yield made
    made.close()


def process(child: Child) -> subprocess.Popen[bytes]:
    assert child._process
    return child._process


def test_it_is_reused_and_does_not_outlive_what_it_cannot_answer(child: Child) -> None:
    """Off the main thread, where no signal of ours arrives."""
    verdicts = []
    asked = [RIGHT, WRONG, ENDLESS, RIGHT]

    def ask() -> None:
        for pair in asked:
            verdicts.append((child.equal(*pair), child._process))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    assert [verdict for verdict, _ in verdicts] == [True, False, False, True]
    first, second, third, fourth = (made for _, made in verdicts)
    assert first is second and third is None and fourth is not first
    assert first.returncode == -signal.SIGPROF  # and waited for: no zombie


def test_a_tower_of_powers_in_a_thread_is_wrong_at_once() -> None:
    found = []
    text = r"\boxed{9^{9^{9^9}}}"
    thread = threading.Thread(target=lambda: found.append(is_correct(text, "3")), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [False]


def test_many_threads_get_their_own_answers(child: Child) -> None:
    asked = [RIGHT, WRONG, (r"\sqrt{n^2}", "|n|"), ("n", "|n|")] * 8
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda pair: child.equal(*pair), asked)) == [True, False] * 16


def test_an_interrupted_question_does_not_answer_the_next(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    child.equal(*RIGHT)
    with monkeypatch.context() as patched:

        def interrupted(process, question):
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            raise KeyboardInterrupt

        patched.setattr(deciding, "_ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            child.equal(*RIGHT)
    assert not child.equal(*WRONG)


def test_a_child_that_died_idle_costs_no_verdict(child: Child) -> None:
    child.equal(*RIGHT)
    process(child).kill()
    process(child).wait()
    assert child.equal(*RIGHT)


def test_closing_leaves_nothing(child: Child) -> None:
    child.equal(*RIGHT)
    started = process(child)
    child.close()
    child.close()
    assert started.returncode == -signal.SIGKILL
    assert started.stdin and started.stdin.closed and started.stdout and started.stdout.closed


def test_a_child_that_cannot_start_is_one_line(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match="sympy") as caught:
        child.equal(*RIGHT)
    assert "\n" not in str(caught.value)


SCRIPT = r"""
import os, sys
from kvpolicies.eval.tasks import grading
from kvpolicies.eval.tasks.maths import deciding
assert grading.is_correct(r"\boxed{\frac{14}{3}}", "14/3") and not grading.is_correct("#### 2", "3")
assert deciding._CHILD._process is None, "plain numbers need no child"
right = [deciding.equal(rf"\sqrt{{{4 * n}}}", rf"2\sqrt{{{n}}}") for n in (2, 3)]
if (forked := os.fork()) == 0:  # both ask on, neither takes the other's answers
    ok = all(deciding.equal(rf"\sqrt{{{9 * n}}}", rf"3\sqrt{{{n}}}") for n in range(2, 9))
    deciding._CHILD.close()
    os._exit(0 if ok else 1)
wrong = [deciding.equal(rf"\sqrt{{{9 * n}}}", rf"3\sqrt{{{n + 1}}}") for n in range(2, 9)]
assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
assert all(right) and not any(wrong) and "sympy" not in sys.modules
print(deciding._CHILD._process.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "killed"])
def test_forks_ask_apart_and_no_child_survives_its_parent(killed: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin and parent.stdout
        with os.fdopen(os.pidfd_open(int(parent.stdout.readline()))) as handle:
            if killed:
                parent.kill()
            parent.stdin.close()
            assert select.select([handle], [], [], 60)[0]  # readable once it has ended
    assert killed or parent.returncode == 0
