"""Documents packed into rows of exactly S tokens, in an order that a run can return to.

A block of documents is packed at a time, whole ones only (longer ones than a row are cut, or left
out), each into the fullest row that still holds it. So rows are a function of data, seed and place;
every process packs the same ones and takes its own (see data.py).
"""

import bisect
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicies.errors import UserError

PAD = 0


class DataCursor(NamedTuple):
    """How far the data were read: three whole numbers."""

    epoch: int = 0
    first: int = 0
    """Documents of the epoch before the block."""
    row: int = 0
    """Rows of the block that were given."""


class PackedRow(NamedTuple):
    """S tokens; `documents` numbers them from 0, and never falls."""

    tokens: Tensor
    """[S] int64."""
    documents: Tensor
    """[S] int32. What fills up the end is padding, each token a document of its own: it has no
    future, nobody attends to it, and no loss sees it."""


class Blocks(Protocol):
    """Where documents come from."""

    def block(self, epoch: int, first: int) -> Sequence[Sequence[int]]:
        """Token ids of some documents from the epoch's number `first` on; none at its end."""
        ...


def pack(documents: Sequence[Sequence[int]], length: int, longer: str = "cut") -> list[PackedRow]:
    """Rows of `length` tokens that hold all documents, best fit, the longest first; none empty.

    Args:
        longer: what happens to documents of more tokens than a row: `cut`, or `leave_out`.
    """
    fits = (d for d in documents if longer == "cut" or len(d) <= length)
    cut = [list(document[:length]) for document in fits if document]
    rows: list[list[list[int]]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, which row), sorted
    for document in sorted(cut, key=len, reverse=True):
        at = bisect.bisect_left(open_rows, (len(document), -1))
        if at == len(open_rows):
            free, row = length, len(rows)
            rows.append([])
        else:
            free, row = open_rows.pop(at)
        rows[row].append(document)
        bisect.insort(open_rows, (free - len(document), row))
    return [_row(members, length) for members in rows]


def _row(members: list[list[int]], length: int) -> PackedRow:
    tokens = [token for member in members for token in member]
    numbers = [number for number, member in enumerate(members) for _ in member]
    padding = length - len(tokens)
    tokens += [PAD] * padding
    numbers += range(len(members), len(members) + padding)
    return PackedRow(torch.tensor(tokens), torch.tensor(numbers, dtype=torch.int32))


def rows_from(
    source: Blocks, length: int, seed: int, place: DataCursor, longer: str = "cut"
) -> Iterator[tuple[PackedRow, DataCursor]]:
    """Rows from `place` on, without end, each with the place behind it.

    Raises:
        UserError: if there is not one document in the data that can be trained on.
    """
    epoch, first, used = place
    given = first > 0 or used > 0
    while True:
        block = source.block(epoch, first)
        if not block:
            if not given:
                most = f" of at most {length} tokens" if longer == "leave_out" else ""
                raise UserError(f"data: not one document to train on{most}")
            epoch, first, used, given = epoch + 1, 0, 0, False
            continue
        rows = pack(block, length, longer)
        random.Random(f"rows {seed} {epoch} {first}").shuffle(rows)
        for index in range(used, len(rows)):
            given = True
            yield rows[index], DataCursor(epoch, first, index + 1)
        first, used = first + len(block), 0
