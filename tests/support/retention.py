"""Retention by brute force: the top k recomputed at every query, and random cases full of ties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

NEVER = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """Arguments of `retain`."""

    priorities: Tensor
    sinks: int
    window: int
    topk: int
    documents: Tensor | None

    def __iter__(self) -> Iterator:
        return iter((self.priorities, self.sinks, self.window, self.topk, self.documents))


def random_case(seed: int, rows: int = 1, longest: int = 40) -> Case:
    """Few different priorities, decay folded in or not, one document or several of odd lengths."""
    made = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=made))

    s = draw(1, longest)
    priorities = torch.randint(-3, 4, (rows, s), generator=made).float()
    if draw(0, 1):  # halves and wholes, so that tokens of other ages tie
        priorities += draw(0, 2) * 0.5 * torch.arange(s)
    documents = None
    if draw(0, 1):
        steps = (torch.rand(rows, s, generator=made) < 3 / longest).long()
        documents = (steps * draw(1, 5)).cumsum(-1) + draw(0, 1)
    window = draw(0, 1) if draw(0, 1) else draw(0, 8)
    return Case(priorities, draw(0, 4) * draw(0, 1), window, draw(1, 9), documents)


def spans(documents: Tensor | None, length: int) -> list[tuple[int, int]]:
    """(first, last + 1) of each document of a row [S]."""
    if documents is None:
        return [(0, length)]
    cuts = [i for i in range(1, length) if documents[i] != documents[i - 1]]
    return list(pairwise([0, *cuts, length]))


def brute_force(case: Case) -> tuple[Tensor, Tensor]:
    """(boundary, expires) of `retain`."""
    r, s = case.priorities.shape
    boundary = torch.full((r, s), -1, dtype=torch.int32)
    expires = torch.full((r, s), NEVER, dtype=torch.int32)
    for row in range(r):
        values = case.priorities[row].tolist()
        documents = None if case.documents is None else case.documents[row]
        for first, last in spans(documents, s):
            for q in range(first, last):
                before = eligible(first + case.sinks, q - 1 - case.window, values)
                if len(before) >= case.topk:
                    boundary[row, q] = before[case.topk - 1]
                for t in eligible(first + case.sinks, q - case.window, values)[case.topk :]:
                    expires[row, t] = min(int(expires[row, t]), q)
    return boundary, expires


def eligible(low: int, high: int, values: list[float]) -> list[int]:
    """Tokens low..high, best first; of equal ones the larger position."""
    return sorted(range(low, high + 1), key=lambda t: (values[t], t), reverse=True)
