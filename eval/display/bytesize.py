"""Bytes as people read and write them."""

import re

from kvpolicies.errors import UserError, shown

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20,
          "GIB": 1 << 30}  # fmt: skip


def size(count: float) -> str:
    """`812 B`, `1.3 GiB`, `4,096 GiB`."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"


def parse_bytes(text: str) -> int:
    """`"80GB"` (10^9) or `"80GiB"` (2^30) as a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([KMG]I?B)?\s*", text.upper())
    if not match or float(match[1]) <= 0:
        raise UserError(f"--memory {shown(text)}: expected a size such as 80GB or 24GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])
