"""The system calls that a sandboxed answer may make, as a filter for the Linux kernel (seccomp).

Why this and not namespaces: a seccomp filter needs no right of any kind and no daemon, so it holds
for an ordinary user, inside containers and where user namespaces are switched off (Ubuntu 24.04's
AppArmor, Docker's default profile). And it makes whole kinds of attack impossible instead of
bounding them: without `socket` there is no network, without `fork` no fork bomb and no grandchild
that survives, without `kill` no victim, and a file is never opened for writing.

What is not listed is refused with EPERM, so calls that future kernels add are refused too. Numbers
are the kernel's own (arch/x86 `syscall_64.tbl`, `asm-generic/unistd.h`); sandbox.check proves on
each machine that the filter refuses what it must.
"""

import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "arm64": (1, 0xC00000B7)}

# name: (x86-64, arm64), None where the architecture has no such call
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # files that are open already, and reading what is there
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66),
    "pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70),
    "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "ftruncate": (77, 46),
    # memory, within RLIMIT_AS
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "brk": (12, 214), "mincore": (27, 232),
    # signals to itself by timers, never by kill
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None), "setitimer": (38, 103),
    "getitimer": (36, 102),
    # waiting
    "select": (23, None), "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "eventfd2": (290, 19), "restart_syscall": (219, 128),
    # clocks
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "getrusage": (98, 165),
    # what it is
    "sysinfo": (99, 179), "uname": (63, 160), "getpid": (39, 172), "getppid": (110, 173),
    "gettid": (186, 178), "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158),
    "getcpu": (309, 168), "getpriority": (140, 141), "getrlimit": (97, 163),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    # threads, and the end
    "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "set_tid_address": (218, 96), "rseq": (334, 293),
    "membarrier": (324, 283), "arch_prctl": (158, None), "getrandom": (318, 278),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF operations on 32-bit words
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERRNO | errno.EPERM

_WRITING = 0o3 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_CLONE_THREAD = 0x10000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; not F_SETOWN, which sends signals.
_FCNTL = (0, 1, 2, 3, 4, 1030)
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, how wide, blocking

Instruction = tuple[int, int, int, int]
"""(operation, lines to skip if true, if false, constant)"""


def supported() -> bool:
    """Whether this processor's system calls are known here."""
    return platform.machine() in _ARCHITECTURES


def program(machine: str | None = None) -> bytes:
    """The filter as an array of the kernel's `struct sock_filter`, 8 bytes each.

    Args:
        machine: processor as `platform.machine()` spells it (default: this one).

    Raises:
        KeyError: a processor whose calls are not known here.
    """
    column, audit = _ARCHITECTURES[machine or platform.machine()]
    lines: list[Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), _ended(_KILL)]
    lines.append((_LOAD, 0, 0, 0))
    for numbers in _ALLOWED.values():
        lines += _when(numbers[column], [_ended(_ALLOW)])
    for numbers, then in _conditional():
        lines += _when(numbers[column], then)
    lines.append(_ended(_REFUSE))
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def _conditional() -> list[tuple[tuple[int | None, int | None], list[Instruction]]]:
    """Calls that are allowed for some arguments."""
    thread = [_word(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _ended(_ALLOW), _ended(_REFUSE)]
    asks_own_limits = [
        line
        for word in (_word(0), _word(2), _word(2, high=True))  # pid 0, and no new limit
        for line in (word, (_EQUAL, 1, 0, 0), _ended(_REFUSE))
    ]
    return [
        ((2, None), _reads(1)),  # open
        ((257, 56), _reads(2)),  # openat
        ((56, 220), thread),  # clone
        ((435, 435), [_ended(_ERRNO | errno.ENOSYS)]),  # clone3: libc then takes clone
        ((72, 25), _one_of(1, _FCNTL)),  # fcntl
        ((16, 29), _one_of(1, _IOCTL)),  # ioctl
        ((302, 261), [*asks_own_limits, _ended(_ALLOW)]),  # prlimit64
    ]


def _when(number: int | None, then: list[Instruction]) -> list[Instruction]:
    return [] if number is None else [(_EQUAL, 0, len(then), number), *then]


def _reads(argument: int) -> list[Instruction]:
    """Opening for reading only."""
    return [_word(argument), (_ANY_BIT, 0, 1, _WRITING), _ended(_REFUSE), _ended(_ALLOW)]


def _one_of(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    tests = [line for v in values for line in ((_EQUAL, 0, 1, v), _ended(_ALLOW))]
    return [_word(argument), *tests, _ended(_REFUSE)]


def _word(argument: int, *, high: bool = False) -> Instruction:
    """Loads half of a 64-bit argument; both architectures are little-endian."""
    return (_LOAD, 0, 0, 16 + 8 * argument + 4 * high)


def _ended(verdict: int) -> Instruction:
    return (_RETURN, 0, 0, verdict)
