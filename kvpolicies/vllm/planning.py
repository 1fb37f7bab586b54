"""A forward of vLLM's as batches of ours: planned once, read by every layer.

vLLM hands over a flat list of tokens: one of each request that decodes, some of each prompt that is
brought in, and, of a request that it had thrown out, its prompt and all that it wrote at once. Here
these become forwards of equal width, so that nothing is padded, and each is planned by rows.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.policy import Schedule
from kvpolicies.rows import Counts, Move, Rows


@dataclass(frozen=True)
class Told:
    """What is known of the request that holds a page."""

    prompt: int
    """Tokens of its prompt."""
    schedule: Schedule
    seed: int
    """What identifies it in any batch."""


@dataclass(frozen=True)
class PageTokens:
    """What a forward brings to one page."""

    page: int
    start: int
    """Of its tokens, in vLLM's list."""
    count: int
    seen: int
    """Tokens of the request before these."""


@dataclass(frozen=True)
class Batch:
    """Rows of equal width that are taken in together."""

    take: Tensor
    """[A, T] int64, where their tokens lie in vLLM's list."""
    moves: list[Move]


class Planner:
    """Counts of all pages, which all layers share.

    Args:
        pages: that vLLM has.
        most: tokens of a row that one move may take (attention weights need memory); None = any.
        device: of the tokens.
    """

    def __init__(self, pages: int, most: int | None, device: torch.device):
        self.rows, self.device = Rows(pages), device
        self._most = most

    def plan(
        self, parts: Sequence[PageTokens], told: dict[int, Told]
    ) -> tuple[list[Batch], list[int]]:
        """The batches of a forward, counted, and the pages that begin a sequence with it.

        Raises:
            UserError: for tokens that do not follow on those that a page has seen.
        """
        fresh = [part.page for part in parts if part.seen == 0]
        for page in fresh:
            self.rows.reset(page, told[page].schedule, told[page].seed)
        decoding, batches = [], []
        for part in sorted(parts, key=lambda p: p.page):  # neighbouring pages are one move
            if self.rows.seen[part.page] != part.seen:
                raise UserError(
                    f"vLLM's page {part.page} has seen {self.rows.seen[part.page]} tokens, and is "
                    f"given number {part.seen}"
                )
            prompt = min(max(told[part.page].prompt - part.seen, 0), part.count)
            ended = part.seen + prompt == told[part.page].prompt
            if prompt:
                batches.append(self._one(part, 0, prompt, prompt=True, ended=ended))
            if part.count - prompt == 1 == part.count:
                decoding.append(part)
            elif part.count > prompt:
                batches.append(self._one(part, prompt, part.count, prompt=False, ended=False))
        if decoding:
            take = torch.tensor([[p.start] for p in decoding], device=self.device)
            none = [False] * len(decoding)
            counts = Counts([p.page for p in decoding], [1] * len(decoding), none, none)
            batches.append(self._counted(take, counts, None))
        return batches, fresh

    def _one(self, part: PageTokens, first: int, last: int, *, prompt: bool, ended: bool) -> Batch:
        """Some tokens of one request. What it wrote comes again one by one, as it came."""
        take = torch.arange(part.start + first, part.start + last, device=self.device)[None]
        most = self._most if prompt else 1
        return self._counted(take, Counts([part.page], [last - first], [prompt], [ended]), most)

    def _counted(self, take: Tensor, counts: Counts, most: int | None) -> Batch:
        moves = self.rows.plan(counts, None if most is None else [most] * len(counts.rows))
        self.rows.commit(moves)
        return Batch(take, moves)
