"""How a budget is shared out among the layers that a policy evicts; the sum stays what it was.

`even` gives each the same. `pyramid` is PyramidKV's rule (Cai et al., arXiv 2406.02069, section 4):
what is neither sinks nor window falls linearly from the first layer to the last, which has 1/beta
of the mean (beta = 20, as in the authors' code). A file, which `kvpolicies revisit --profile FILE`
writes, gives each layer its own share.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvpolicies.errors import UserError, nearest, shown

EVEN, PYRAMID = "even", "pyramid"
NAMES = (EVEN, PYRAMID)
BETA = 20
KEY = "shares"
"""Of a file: one number a layer that is evicted, in the model's order."""


def check(layers: str) -> None:
    """Looks at a way of sharing before any model is there.

    Raises:
        UserError: neither a name nor a file with shares.
    """
    if layers not in NAMES:
        _read(layers)


def shares_of(layers: str, count: int) -> tuple[Fraction, ...]:
    """Each layer's share, of `count` layers that are evicted; in any unit.

    Raises:
        UserError: as `check`; a file of another number of layers.
    """
    if layers == EVEN or count < 2:
        return (Fraction(1),) * count
    if layers == PYRAMID:
        last, first = Fraction(1, BETA), 2 - Fraction(1, BETA)
        return tuple(first - (first - last) * i / (count - 1) for i in range(count))
    found = _read(layers)
    if len(found) != count:
        raise UserError(
            f"layers {layers}: {len(found)} shares, and the model has {count} layers that are "
            "evicted; make its own (kvpolicies revisit --profile FILE)"
        )
    return found


def apportion(total: int, shares: Sequence[Fraction]) -> tuple[int, ...]:
    """`total` in whole numbers by `shares`: exact in sum, one at least to each (largest remainders,
    of equal ones the first).

    Args:
        total: at least as many as there are shares.
    """
    spare, whole = total - len(shares), sum(shares)
    exact = [spare * share / whole for share in shares]
    floors = [int(x) for x in exact]
    order = sorted(range(len(shares)), key=lambda i: floors[i] - exact[i])
    more = set(order[: spare - sum(floors)])
    return tuple(1 + n + (i in more) for i, n in enumerate(floors))


def mean(slots: Sequence[int]) -> int:
    """The mean of layers' slots, rounded up: at most n if and only if their sum is n a layer."""
    return -(-sum(slots) // len(slots))


def _read(name: str) -> tuple[Fraction, ...]:
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"layers {name!r}: no such file, and no way of sharing: {nearest(name, NAMES)}, or a "
            "file that kvpolicies revisit --profile FILE wrote"
        )
    return _parsed(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _parsed(path: Path, _: int) -> tuple[Fraction, ...]:
    from kvpolicies.yamls import read_yaml

    content = read_yaml(path)
    values: Any = content.get(KEY) if isinstance(content, dict) else None
    numbers = isinstance(values, list) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < float("inf")
        for x in values
    )
    if not numbers or not any(values):
        raise UserError(
            f"layers {path}: expected {KEY}: [a number >= 0 a layer], not all 0, got "
            f"{shown(values)}"
        )
    return tuple(Fraction(x) for x in values)
