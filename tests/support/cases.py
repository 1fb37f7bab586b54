"""Random cases for comparing our cache with the references: sizes first, data only when needed.

A batch is one to three rows of different lengths that share one left-padded forward; each row is
a case of its own, with its own sequence, prompt and, at times, budget.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np

# Rows of batch number i: 12 cases in 5 batches.
ROWS = (1, 3, 2, 3, 3)
# Copies of tokens tie exactly, but where float32 rounds; whole numbers (see `draw_whole`) tie
# exactly in float32 too. "topics" are real ones, queries around two directions.
WHOLE = ("whole", "one-hot")
ALL_KINDS = ("real", "real", "copies", *WHOLE)


@dataclass(frozen=True)
class Row:
    """One case: tokens of the prompt, tokens decoded, and the budget's three numbers."""

    prompt: int
    decoded: int
    budget: tuple[int, int, int]


@dataclass(frozen=True)
class Batch:
    """Rows of one left-padded forward, and what their sequences are like (see ALL_KINDS)."""

    seed: tuple[int, int]
    kind: str
    heads: int
    group: int
    dim: int
    rows: tuple[Row, ...]

    def streams(self, reference: ModuleType) -> Iterator[Any]:
        """The rows' sequences."""
        rng = np.random.default_rng([*self.seed, 1])
        sizes: dict[str, Any] = dict(heads=self.heads, group=self.group, dim=self.dim)
        for row in self.rows:
            lengths = dict(tokens=row.prompt + row.decoded, prompt=row.prompt)
            if self.kind in WHOLE:
                ties: dict[str, Any] = dict(one_hot=self.kind == "one-hot", repeated=0.3)
                yield reference.draw_whole(rng, **sizes, **lengths, **ties)
            else:
                options = {
                    "copies": dict(tied_keys=0.05, tied_queries=0.3),
                    "topics": dict(topics=3),
                }
                yield reference.draw(rng, **sizes, **lengths, **options.get(self.kind, {}))


@dataclass(frozen=True)
class Needs:
    """What a policy's cases must be like.

    topks: slots beyond sinks and window, to draw from. slots: the fewest that the policy takes.
    decoded: the most tokens to decode. kinds: of the sequences, five in turn. groups: query heads
    a KV head, where the sequence is of whole numbers.
    """

    topks: tuple[int, ...] = (1, 2, 5, 11, 20)
    slots: int = 0
    decoded: int = 41
    kinds: tuple[str, ...] = ALL_KINDS
    groups: tuple[int, ...] = (1, 2, 4, 7)
    beside: int | None = None
    """Slots that a prompt leaves free at least; None: it may be longer than the budget."""


def draw_batch(spec: str, number: int, needs: Needs) -> Batch:
    """Batch `number` of a policy's cases."""
    seed = (crc32(spec.encode()), number)
    rng = np.random.default_rng(seed)
    kind = needs.kinds[(number + number // 5) % 5]
    dims = {"whole": [16, 64], "one-hot": [4, 16, 64]}.get(kind, [8, 8, 8, 32, 64, 80, 96, 128])
    group = int(rng.choice(needs.groups if kind in WHOLE else Needs.groups))
    first = _budget(rng, needs)
    rows = []
    for _ in range(ROWS[number % 5]):
        budget = first if rng.random() < 0.7 else _budget(rng, needs)
        prompt = _prompt(rng, budget[0])
        if needs.beside is not None:
            prompt = min(prompt, budget[0] - needs.beside)
        if rows and rng.random() < 0.3:  # rows that do the same in each step
            prompt, budget = rows[-1].prompt, rows[-1].budget
        rows.append(Row(prompt, _decoded(rng, needs.decoded), budget))
    heads = 1 if group == 7 else int(rng.integers(1, 3))
    return Batch(seed, kind, heads, group, int(rng.choice(dims)), tuple(rows))


def _budget(rng: np.random.Generator, needs: Needs) -> tuple[int, int, int]:
    sinks, window = int(rng.integers(0, 5)), int(rng.integers(0, 9))
    return max(sinks + window + int(rng.choice(needs.topks)), needs.slots), sinks, window


def _prompt(rng: np.random.Generator, total: int) -> int:
    """From one token to four times the budget, both ends included."""
    if rng.random() < 0.1:
        return int(rng.choice([1, 4 * total]))
    return 1 + int(4 * total * rng.random() ** 1.5)


def _decoded(rng: np.random.Generator, most: int) -> int:
    """Mostly a few tokens, at times as many as make forty evictions in a row."""
    return int(rng.integers(1, 12)) if rng.random() < 0.75 else int(rng.integers(12, most + 1))
