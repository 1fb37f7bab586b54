"""Packing and the order of rows: documents whole, numbers right, devices apart, places exact."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicies.errors import UserError
from kvpolicies.train.data import HeldOutRows, TrainingRows
from kvpolicies.train.packing import DataCursor, PackedRow, pack, rows_from
from kvpolicies.train.recipe import Recipe


def documents_in(row: PackedRow) -> list[list[int]]:
    """The row's documents, padding left out."""
    found: dict[int, list[int]] = {}
    for token, number in zip(row.tokens.tolist(), row.documents.tolist(), strict=True):
        found.setdefault(number, []).append(token)
    return [tokens for tokens in found.values() if tokens != [0]]


class Numbered:
    """Documents of 3 to 40 equal tokens, a number of their own each; `size` an epoch."""

    def __init__(self, size: int = 50, block: int = 16):
        self.size, self.length = size, block

    def block(self, epoch: int, first: int) -> list[list[int]]:
        numbers = range(first, min(first + self.length, self.size))
        return [[1 + epoch * self.size + n] * (3 + n * 7 % 38) for n in numbers]


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 32))
def test_documents_stay_whole_and_none_is_lost(lengths: list[int], size: int) -> None:
    documents = [[n + 1] * length for n, length in enumerate(lengths)]
    rows = pack(documents, size)
    for row in rows:
        assert row.tokens.shape == row.documents.shape == (size,)
        steps = row.documents.diff()
        assert row.documents[0] == 0 and bool(((steps == 0) | (steps == 1)).all())
    found = sorted(document for row in rows for document in documents_in(row))
    assert found == sorted(document[:size] for document in documents if document)


def test_documents_longer_than_a_row_can_be_left_out() -> None:
    documents = [[1] * 9, [2] * 8, [3] * 3]
    (row,) = pack(documents[1:2], 8, "leave_out")
    assert documents_in(row) == [[2] * 8]
    kept = [document for row in pack(documents, 8, "leave_out") for document in documents_in(row)]
    assert sorted(kept) == [[2] * 8, [3] * 3]
    with pytest.raises(UserError, match="not one document to train on of at most 2 tokens"):
        next(rows_from(Numbered(), 2, 0, DataCursor(), "leave_out"))


def test_padding_is_one_document_a_token() -> None:
    (row,) = pack([[5, 5, 5], [6, 6]], 8)
    assert row.tokens.tolist() == [5, 5, 5, 6, 6, 0, 0, 0]
    assert row.documents.tolist() == [0, 0, 0, 1, 1, 2, 3, 4]


def test_rows_fill_up() -> None:
    documents = Numbered(128, 128).block(0, 0)
    rows = pack(documents, 128)
    assert sum(map(len, documents)) / (128 * len(rows)) > 0.95


def test_each_epoch_holds_every_document_once() -> None:
    walk = rows_from(Numbered(), 64, 0, DataCursor())
    seen: list[int] = []
    for row, place in walk:
        if place.epoch == 2:
            break
        seen += [document[0] for document in documents_in(row)]
    assert sorted(seen) == list(range(1, 101))


def test_from_any_place_the_rows_go_on_as_they_did() -> None:
    whole = list(islice(rows_from(Numbered(), 64, 3, DataCursor()), 60))
    for done in (1, 7, 25, 44):
        rest = list(islice(rows_from(Numbered(), 64, 3, whole[done - 1][1]), 60 - done))
        for (row, place), (same, here) in zip(whole[done:], rest, strict=True):
            assert place == here and torch.equal(row.tokens, same.tokens)


def test_another_seed_gives_another_order() -> None:
    first, second = (next(rows_from(Numbered(), 64, seed, DataCursor()))[0] for seed in (0, 1))
    assert not torch.equal(first.tokens, second.tokens)


class Empty(Numbered):
    """Documents without a token."""

    def block(self, epoch: int, first: int) -> list[list[int]]:
        return [[] for _ in super().block(epoch, first)]


@pytest.mark.parametrize("source", [Numbered(0), Empty(5)])
def test_no_documents_at_all_is_an_error(source: Numbered) -> None:
    with pytest.raises(UserError, match="not one document"):
        next(rows_from(source, 64, 0, DataCursor()))


START = DataCursor()


def batches(count: int, rank: int = 0, world: int = 1, parts: int = 1, place: DataCursor = START):
    recipe = Recipe(sequence=256, budget=(64,), delay=8, batch=4, accumulate=parts)
    data = TrainingRows(Numbered(), recipe, 4 // (world * parts), rank, world, place)
    return list(islice(iter(data), count))


@pytest.mark.parametrize(("world", "parts"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)])
def test_a_steps_rows_are_the_same_on_any_devices_and_apart(world: int, parts: int) -> None:
    whole = torch.stack([batch["tokens"] for batch in batches(6)])  # [steps, 4, S]
    ranks = [batches(6 * parts, rank, world, parts) for rank in range(world)]
    for step in range(6):
        rows = [
            batch["tokens"]
            for part in range(parts)
            for own in ranks
            for batch in [own[step * parts + part]]
        ]
        assert torch.equal(torch.cat(rows), whole[step])
    for own in ranks[1:]:  # all know the same place
        assert torch.equal(own[-1]["place"], ranks[0][-1]["place"])


def test_a_batch_says_where_the_next_one_begins() -> None:
    whole = batches(9)
    rest = batches(4, place=DataCursor(*whole[4]["place"].tolist()))
    for batch, same in zip(whole[5:], rest, strict=True):
        assert torch.equal(batch["tokens"], same["tokens"])


def test_workers_share_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker k of n makes every n-th batch, and Lightning takes them in turn."""
    from types import SimpleNamespace

    from kvpolicies.train import data

    whole = batches(8)
    for worker in range(2):
        info = SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr(data, "get_worker_info", lambda info=info: info)
        for batch, same in zip(batches(4), whole[worker::2], strict=True):
            assert torch.equal(batch["tokens"], same["tokens"])


def test_held_out_rows_are_shared_too() -> None:
    rows = pack(Numbered().block(0, 0), 64)
    sizes = [len(HeldOutRows(rows, rank, 3)) for rank in range(3)]
    assert sum(sizes) == len(rows)
