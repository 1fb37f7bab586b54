"""What memory a machine has: what would need more is refused before anything is allocated.

Bounds of options follow from here. There is no other limit on problems, samples, tokens or hidden
units than that what they come to must fit.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicies.errors import UserError

if TYPE_CHECKING:
    import torch

ENTRY = 36
"""Bytes of a number in a list of Python's: the least that a token or a sample takes."""
_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
"""Where Linux says what a container may use, in its newer and its older form."""


def total(device: "torch.device | None" = None) -> int | None:
    """Bytes of a device's memory, whatever is in use of it; None where nobody says.

    Args:
        device: None is the machine's own memory.
    """
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    found = []
    with suppress(ValueError, OSError):  # of systems other than Linux and macOS
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # else "max"
            found.append(int(text))
    return min(found, default=None)


def check(needed: int, what: str, instead: str, device: "torch.device | None" = None) -> None:
    """Refuses what takes more bytes than there are.

    Args:
        what: takes them, for the beginning of a sentence.
        instead: what to do, for its end.

    Raises:
        UserError: naming both numbers.
    """
    there = total(device)
    if there is not None and needed > there:
        where = "this machine" if device is None or device.type != "cuda" else f"device {device}"
        raise UserError(
            f"{what} would take {shown(needed)}, and {where} has {shown(there)}: {instead}"
        )


def shown(count: int) -> str:
    """Bytes, in the largest unit of which there is one."""
    if count >= 1 << 100:  # more than any float of it would say
        return f"2^{count.bit_length() - 1} B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:,.4g} TiB" if count < 10_000 else f"{count:.1e} TiB"
