"""Batches of packed rows for Lightning, and how far they were read, saved with each checkpoint.

A step's rows are consecutive rows of one sequence that depends on data and seed alone. Every
process and worker walks along it and keeps its own: so rows are disjoint over devices, the same
however many there are, and a resumed run goes on with the row after the last.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from kvpolicies.errors import UserError
from kvpolicies.train.packing import Blocks, DataCursor, PackedRow, pack, rows_from
from kvpolicies.train.recipe import Recipe
from kvpolicies.train.sources import Source

Batch = dict[str, Tensor]
"""tokens [B, S] int64, documents [B, S] int32, and in training place [3]: what was read by then."""


class TrainingRows(IterableDataset):
    """One device's batches, without end.

    Args:
        rows: in a batch, on this device.
        rank, world: which device of how many.
        place: behind the last row that was trained on.
    """

    def __init__(
        self, source: Blocks, recipe: Recipe, rows: int, rank: int, world: int, place: DataCursor
    ):
        self.source, self.recipe, self.place = source, recipe, place
        self.rows, self.rank, self.world = rows, rank, world

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        of = self.recipe
        walk = rows_from(self.source, of.sequence, of.seed, self.place, of.longer)
        for part in count():
            taken = [next(walk) for _ in range(self.rows * self.world)]
            if part % workers == worker:
                own = taken[self.rank * self.rows : (self.rank + 1) * self.rows]
                yield {**_stacked([row for row, _ in own]), "place": torch.tensor(taken[-1][1])}


class HeldOutRows(Dataset):
    """Every `world`-th row of the held-out documents; row by row, so that figures do not mix."""

    def __init__(self, rows: list[PackedRow], rank: int, world: int):
        self.rows = rows[rank::world]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return _stacked([self.rows[index]])


def _stacked(rows: list[PackedRow]) -> Batch:
    return {
        "tokens": torch.stack([row.tokens for row in rows]),
        "documents": torch.stack([row.documents for row in rows]),
    }


class Data(lightning.LightningDataModule):
    """Training and held-out rows of a recipe's source."""

    def __init__(self, source: Source, recipe: Recipe):
        super().__init__()
        self.source, self.recipe = source, recipe
        self.place = DataCursor()
        held_out = source.held_out(recipe.held_out)
        longest = max((len(document) for document in held_out), default=0)
        if longest <= max(recipe.budget):
            raise UserError(
                f"data {recipe.data}: the longest of {len(held_out)} held-out documents has "
                f"{longest} tokens, no more than the budget of {max(recipe.budget)}: nothing "
                "would be evicted"
            )
        self.held_out = pack(held_out, recipe.sequence, recipe.longer)

    def train_dataloader(self) -> DataLoader:
        """Batches from the place reached."""
        assert self.trainer is not None
        rank, world = self.trainer.global_rank, self.trainer.world_size
        rows = self.recipe.batch // (world * self.recipe.accumulate)
        data = TrainingRows(self.source, self.recipe, rows, rank, world, self.place)
        return DataLoader(data, batch_size=None, num_workers=self.recipe.workers)

    def val_dataloader(self) -> DataLoader:
        """The held-out rows of this device."""
        assert self.trainer is not None
        data = HeldOutRows(self.held_out, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(data, batch_size=None)

    def state_dict(self) -> dict[str, Any]:
        """The place of the last batch trained on, the same on every device."""
        return {"place": list(self.place)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self.place = DataCursor(*state_dict["place"])
