"""Who works on what in a folder of results: locks that the operating system gives back.

A claim is a POSIX record lock (fcntl) on one byte of `claims.lock`. It belongs to the process that
took it and ends with it, however it ends: there is no heartbeat to miss and nothing to clean up.
A child that outlives its parent holds nothing of it (flock would be inherited). Such locks hold
between machines that share a folder too, where the file system has them (NFS, Lustre, GPFS, Ceph);
where a machine is lost as a whole, its server frees them once the lease has run out.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from kvpolicies.errors import UserError

NAME = "claims.lock"
FOLDER = 0
"""The folder itself: run.json, merging, the report."""
WAIT = 0.5
"""Seconds between two looks at what others hold."""
_MANY = 1 << 24

# A process's record locks do not exclude itself, and go when it closes any handle of the file.
_mine: set[tuple[int, int]] = set()


def writer(number: int) -> int:
    """What stands for the results file of this number."""
    return 1 + number


def unit(number: int) -> int:
    """What stands for the unit of work of this number."""
    return _MANY + number


class Claims:
    """The claims of this process on a folder that exists. Use it in a `with` block.

    Raises:
        UserError: this process holds claims on the folder already; its file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> "Claims":
        path = self.folder / NAME
        # Looked at before it is opened: closing a second handle would give all claims back.
        if path.exists() and _identity(path.stat()) in _mine:
            raise UserError(f"--out {self.folder}: this process already runs a study there")
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        self._own = _identity(os.fstat(self._file.fileno()))
        _mine.add(self._own)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        _mine.discard(self._own)

    def take(self, what: int) -> bool:
        """Claims `what` unless another process has; True if it is ours now."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, what)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise UserError(
                f"--out {self.folder}: its file system grants no locks ({error.strerror}); "
                "choose a folder on another one"
            ) from None
        return True

    def wait(self, what: int) -> None:
        """Claims `what`, once whoever has it gives it back."""
        while not self.take(what):
            time.sleep(WAIT)

    def release(self, what: int) -> None:
        """Gives a claim back."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, what)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds a folder that exists for this process: where work is not shared, but done by one.

    Raises:
        UserError: another process works there.
    """
    with Claims(folder) as held:
        if not held.take(writer(0)):
            raise UserError(
                f"--out {folder}: another process is at work there; wait for its end, or give "
                "another folder"
            )
        yield


def check_free(folder: Path) -> None:
    """Raises UserError if another process works alone in a folder, which need not exist.

    It tells before a model is loaded what `alone` would tell after that.
    """
    if (folder / NAME).exists():
        with alone(folder):
            pass


@contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """Holds what describes a folder as a whole, once whoever has it gives it back."""
    with Claims(folder) as held:
        held.wait(FOLDER)
        yield


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
