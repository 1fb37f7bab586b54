"""Policies that look ahead, in studies: how they are run, and how their numbers are marked.

Where a task generates, such a policy has to be given the tokens to come: full's own, of the same
sample. At every step the model, under eviction, chooses a token as it would by itself (the same
sampler, the same random number), and then goes on with full's. The choices are what is graded, so
that without evictions they are full's own text; one wrong choice is not punished by all that
follows from it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpolicies.errors import UserError
from kvpolicies.eval.study.results import Key
from kvpolicies.eval.tasks.measures import Row
from kvpolicies.registry import resolve

if TYPE_CHECKING:
    from kvpolicies.generation import Generation

REPLAYS = "replays full's tokens"
LOOKS_AHEAD = "looks ahead"
MARK = "†"


def mode(policy: str, forced: bool) -> str:
    """A result row's `mode`: what its policy was told beforehand; empty for all others."""
    if not resolve(policy).needs_future:
        return ""
    return LOOKS_AHEAD if forced else REPLAYS


def note(forced: bool) -> str:
    """What the mark on a policy's name means."""
    if forced:
        return f"{MARK} looks ahead in the recorded full run: no policy to deploy."
    return (
        f"{MARK} chooses with full's own tokens as context, and knows their attention: no policy "
        "to deploy."
    )


def tokens_of(rows: Sequence[Row], keys: Sequence[Key]) -> list[list[int]]:
    """The new tokens of finished samples.

    Raises:
        UserError: a row that is needed is not there.
    """
    found = {Key.of(row): row["tokens"] for row in rows}
    for key in keys:
        if not found.get(key):
            raise UserError(f"results: no tokens of {key.policy} for problem {key.problem!r}")
    return [found[key] for key in keys]


def as_chosen(made: "Generation", stops: Sequence[int]) -> "Generation":
    """A forced generation as its own choices, which end where a stop token was chosen."""
    ends = [i for i, token in enumerate(made.choices) if token in stops]
    if ends:
        return replace(made, tokens=made.choices[: ends[0] + 1], finish="stop")
    return replace(made, tokens=made.choices, finish="length")
