"""Where documents come from: ledger problems, JSON lines, or whatever `datasets` reads.

A source is found before a model is loaded (`find`), and opened with its tokenizer (`open_source`).
Held-out documents are the first of the data; an epoch is a seeded order of the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvpolicies.errors import UserError
from kvpolicies.eval.tasks import ledger
from kvpolicies.files import parse_json, read_lines
from kvpolicies.models.form import AUTO, Form
from kvpolicies.train.documents import Encode, Record, columns_of, encoder, ledger_encoder
from kvpolicies.train.recipe import Recipe, check_there

# Documents packed at a time.
BLOCK = 128
# Ledger problems have negative seeds, of runs that no embedded model was trained by.
RUN = 1 << 20
_ROWS = 1 << 12
# Records of a stream that are shuffled among each other.
SHUFFLED = 1000
NEMOTRON = "nemotron-math-v2"


@dataclass(frozen=True)
class Ledgers:
    """Endless ledger problems of 150 to 800 tokens; held out are those of another run's seeds."""

    tokenizer: Any
    seed: int
    form: Form = AUTO

    def block(self, epoch: int, first: int) -> list[list[int]]:
        """Documents `first` and following of the epoch: a block of them."""
        return self._problems(RUN + 1 + self.seed, range(first, first + BLOCK))

    def held_out(self, count: int) -> list[list[int]]:
        """`count` documents, equal for every seed."""
        return self._problems(RUN, range(count))

    def _problems(self, run: int, numbers: range) -> list[list[int]]:
        encode = ledger_encoder(self.tokenizer, self.form)
        seeds = [ledger.training_seed(run, n // _ROWS, n % _ROWS) for n in numbers]
        return [encode(ledger.make_problem(seed)) for seed in seeds]


@dataclass(frozen=True)
class Records:
    """Records that can be had by number, in a new order each epoch."""

    records: Sequence[Record]
    encode: Encode
    seed: int
    apart: int
    """So many, the first, are held out."""

    def block(self, epoch: int, first: int) -> list[list[int]]:
        """Documents `first` and following of the epoch: a block of them."""
        g = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
        order = torch.randperm(len(self.records) - self.apart, generator=g)
        chosen = (order[first : first + BLOCK] + self.apart).tolist()
        return [self.encode(self.records[number]) for number in chosen]

    def held_out(self, count: int) -> list[list[int]]:
        """The first `count` documents."""
        return [self.encode(self.records[number]) for number in range(count)]


@dataclass
class Streamed:
    """Records that come one after another, shuffled within a buffer."""

    records: Any  # datasets.IterableDataset
    encode: Encode
    seed: int
    apart: int
    _at: tuple[int, int] = (-1, -1)
    _open: Iterator[Record] = field(default_factory=lambda: iter(()))

    def block(self, epoch: int, first: int) -> list[list[int]]:
        """A block of documents: the next ones of the stream, or those that it first skips to."""
        if (epoch, first) != self._at:
            order = self.records.skip(self.apart).shuffle(self.seed + epoch, buffer_size=SHUFFLED)
            self._open = iter(order.skip(first) if first else order)
        block = [self.encode(record) for record, _ in zip(self._open, range(BLOCK), strict=False)]
        self._at = (epoch, first + len(block))
        return block

    def held_out(self, count: int) -> list[list[int]]:
        """The first `count` documents."""
        return [self.encode(record) for record in self.records.take(count)]


Source = Ledgers | Records | Streamed


def find(recipe: Recipe) -> Any:
    """The records of the recipe's data: a sequence, a stream, or None for ledger problems.

    Raises:
        UserError: if they are not there, cannot be read, or are too few to hold some out.
    """
    check_there(recipe)
    data, path = recipe.data, Path(recipe.data).expanduser()
    if data == "ledger":
        return None
    if path.is_file():
        records: Any = _lines(path)
    else:
        records = _dataset(recipe, str(path) if path.is_dir() else data)
    if not recipe.stream and len(records) <= recipe.held_out:
        raise UserError(
            f"data {data}: {len(records)} documents, of which held_out takes {recipe.held_out}: "
            "none is left to train on"
        )
    return records


def open_source(recipe: Recipe, records: Any, tokenizer: Any) -> Source:
    """The source of the records that `find` found.

    Raises:
        UserError: for columns that are not there, or a tokenizer that does not fit.
    """
    if records is None:
        return Ledgers(tokenizer, recipe.seed, recipe)
    where = f"data {recipe.data}"
    first = next(iter(records.take(1)), {}) if recipe.stream else records[0]
    columns = columns_of(first, recipe.columns, where)
    encode = encoder(tokenizer, columns, recipe, where)
    kind = Streamed if recipe.stream else Records
    return kind(records, encode, recipe.seed, recipe.held_out)


def _lines(path: Path) -> list[Record]:
    """The objects of a JSON lines file."""
    records = []
    for number, line in enumerate(read_lines(path, "data"), 1):
        if not line.strip():
            continue
        record = parse_json(line, f"data {path}:{number}")
        if not isinstance(record, Mapping):
            raise UserError(f"data {path}:{number}: expected a JSON object")
        records.append(record)
    return records


def _dataset(recipe: Recipe, name: str) -> Any:
    """What `datasets` makes of a folder or a hub id."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"data {name}: needs pip install kvpolicies[train]") from None
    split = recipe.split
    if NEMOTRON in name.lower() and split == "train":
        split = "high_part00"  # it has no split of that name; this is of the high-effort subset
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            name, recipe.subset or None, split=split, streaming=recipe.stream
        )
    except Exception as error:  # network, disk, formats: it raises what it likes
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"data {name}: cannot be loaded: {first}") from error
