"""What is true of a sequence in every layer: its counts, and what they make of the next tokens.

How many slots a row holds, when it evicts and how much goes follows from its schedule and from the
tokens it has seen, never from their content. So a forward is planned once, on the host, and every
layer reads the same plan.

A plan is a list of moves. A move takes the same n tokens' worth of neighbouring rows at once:

    make room (evict, where a row is full) -> append -> attend -> let the policy observe

What a row evicts depends on its tokens and on which of them are prompt, and on nothing else: not on
how a caller cuts the prompt, nor on the rows beside it. A full row frees `Schedule.prompt_drop`
slots when a token of the prompt needs one, however many are left to come, and `Schedule.drop` slots
when a new token does.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from kvpolicies.errors import UserError
from kvpolicies.policy import Schedule

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Move:
    """n tokens of some neighbouring rows; one entry of each list is one row."""

    rows: slice
    """Of the cache."""
    batch: slice
    """The same rows in the forward's batch."""
    columns: slice
    """Of the forward, n wide."""
    n: int
    """Tokens of each row."""
    drops: list[int]
    """Slots that each row frees first."""
    before: list[int]
    """Slots filled once it has."""
    lengths: list[int]
    """Slots filled once the tokens are appended."""
    seen: list[int]
    """Tokens processed of each row, these included."""
    prompt: list[bool]
    """Whether the tokens are prompt."""
    prompts: list[int]
    """Tokens that each row's sequence begins with and that are prompt, these included."""
    unfinished: list[bool]
    """Whether more tokens of the prompt may come before the row is full."""
    first: bool
    """Whether it is the first move of its rows in this forward."""

    @property
    def seen_before(self) -> list[int]:
        """Tokens processed of each row without these: the positions of the first of them."""
        return [x - self.n for x in self.seen]

    @property
    def prompts_before(self) -> list[int]:
        """`prompts` without these."""
        both = zip(self.prompts, self.seen, strict=True)
        return [p - self.n if p == seen else p for p, seen in both]

    def part(self, first: int, last: int) -> "Move":
        """This move, of some of its rows."""
        start, at = self.rows.start, self.batch.start
        lists = ("drops", "before", "lengths", "seen", "prompt", "prompts", "unfinished")
        return replace(
            self,
            rows=slice(start + first, start + last),
            batch=slice(at + first, at + last),
            **{name: getattr(self, name)[first:last] for name in lists},
        )


@dataclass(frozen=True)
class Counts:
    """What a forward brings to its rows, one entry a row."""

    rows: Sequence[int]
    """Rows of the cache, in the order of the batch."""
    tokens: Sequence[int]
    """Real tokens; they are the last of the forward's columns."""
    prompt: Sequence[bool]
    """Whether they are of the prompt."""
    ended: Sequence[bool]
    """Whether the prompt is known to end with them."""

    @classmethod
    def of_a_step(cls, rows: int) -> "Counts":
        """One new token of each of the first rows: a decode step."""
        return cls(range(rows), [1] * rows, [False] * rows, [False] * rows)


class Rows:
    """Counts of all rows of a cache, for layers that share them.

    Attributes:
        lengths, seen: per row: filled slots, and tokens processed so far.
        peak: per row, the most slots ever held.
        schedules: per row, when it evicts; None before its first sequence.
        seeds: per row, the identity of its sequence.
        prompts: per row, tokens that its sequence begins with and that are prompt.
    """

    def __init__(self, rows: int):
        self.lengths, self.seen, self.peak = [0] * rows, [0] * rows, [0] * rows
        self.schedules: list[Schedule | None] = [None] * rows
        self.seeds, self.prompts = [0] * rows, [0] * rows

    def reset(self, row: int, schedule: Schedule, seed: int) -> None:
        """Gives the row to a new sequence."""
        self.lengths[row] = self.seen[row] = self.peak[row] = self.prompts[row] = 0
        self.schedules[row], self.seeds[row] = schedule, seed

    def swap(self, one: int, other: int) -> None:
        """Exchanges the sequences of two rows."""
        for counts in vars(self).values():
            counts[one], counts[other] = counts[other], counts[one]

    def schedule(self, row: int) -> Schedule:
        """The schedule of the row's sequence."""
        schedule = self.schedules[row]
        assert schedule is not None, "row used before reset"
        return schedule

    def room(self, row: int, prompt: bool) -> tuple[int, int]:
        """(slots to free, slots that are free then) before the row's next token."""
        return _room(self.schedule(row), self.lengths[row], self.seen[row], prompt)

    def slot_for_next(self, row: int) -> int:
        """The slot that the row's next token takes while decoding, once room is made for it."""
        return self.lengths[row] - self.room(row, prompt=False)[0]

    def plan(self, counts: Counts, most: Sequence[int] | None = None) -> list[Move]:
        """The moves that take a forward's tokens in; nothing is counted yet.

        Args:
            most: tokens of each row of the batch that one move may take; None = any number.

        Raises:
            UserError: when a row is full and nothing of it may be evicted.
        """
        rows, width = counts.rows, max(counts.tokens, default=0)
        left = list(counts.tokens)
        lengths, seen = [self.lengths[r] for r in rows], [self.seen[r] for r in rows]
        prompts = [self.prompts[r] for r in rows]
        moves: list[Move] = []
        first = True
        while any(left):
            drops, sizes = [0] * len(rows), [0] * len(rows)
            for i, row in enumerate(rows):
                if left[i]:
                    drop, free = _room(self.schedule(row), lengths[i], seen[i], counts.prompt[i])
                    size = min(left[i], free)
                    drops[i], sizes[i] = drop, min(size, most[i]) if most else size
            # Rows that are neighbours in the cache and do the same are one move.
            alike = [(row - i, width - left[i], sizes[i]) for i, row in enumerate(rows)]
            for a, b, (shift, offset, n) in runs(alike):
                if not n:
                    continue
                for i in range(a, b):
                    lengths[i] += n - drops[i]
                    if counts.prompt[i] and prompts[i] == seen[i]:
                        prompts[i] += n
                    seen[i] += n
                move = Move(
                    rows=slice(a + shift, b + shift),
                    batch=slice(a, b),
                    columns=slice(offset, offset + n),
                    n=n,
                    drops=drops[a:b],
                    before=[x - n for x in lengths[a:b]],
                    lengths=lengths[a:b],
                    seen=seen[a:b],
                    prompt=list(counts.prompt[a:b]),
                    prompts=prompts[a:b],
                    unfinished=[
                        counts.prompt[i]
                        and not (counts.ended[i] and n == left[i])
                        and lengths[i] < self.schedule(rows[i]).full_at(seen[i] - lengths[i])
                        for i in range(a, b)
                    ],
                    first=first,
                )
                moves.append(move)
            left = [x - n for x, n in zip(left, sizes, strict=True)]
            first = False
        return moves

    def commit(self, moves: Iterable[Move]) -> None:
        """Counts what the moves brought."""
        for move in moves:
            part = move.rows
            self.lengths[part], self.seen[part] = move.lengths, move.seen
            self.peak[part] = map(max, self.peak[part], move.lengths)
            self.prompts[part] = move.prompts


def _room(schedule: Schedule, length: int, seen: int, prompt: bool) -> tuple[int, int]:
    free = schedule.full_at(seen - length) - length
    if free > 0:
        return 0, free
    if not schedule.drop:
        raise UserError(
            f"the sequence outgrew its {schedule.capacity} slots, and the policy evicts nothing; "
            "the budget must be prompt + max_new_tokens"
        )
    drop = schedule.prompt_drop if prompt else schedule.drop
    return drop, drop


def runs(items: Iterable[Key]) -> Iterator[tuple[int, int, Key]]:
    """Maximal runs of equal neighbours: (first, last + 1, item). Runs are slices, hence views."""
    start = 0
    for key, group in groupby(items):
        stop = start + sum(1 for _ in group)
        yield start, stop, key
        start = stop
