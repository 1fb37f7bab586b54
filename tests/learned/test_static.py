"""What static priorities promise: one eviction time a token is all there is to know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicies.eviction import choose_victims
from kvpolicies.kernels.retention import NEVER
from kvpolicies.learned.boundary import retained, static_priorities


def cases() -> list[tuple[Tensor, int, int, int]]:
    """(priorities [1, 2, S], sinks, window, topk), some with many ties, some with decay."""
    torch.manual_seed(0)
    tied = torch.randint(0, 4, (1, 2, 60)).float()
    decayed = static_priorities(torch.randn(1, 2, 71), torch.tensor([0.0, 0.1]))
    return [(tied, 2, 5, 8), (decayed, 4, 1, 12), (torch.randn(1, 2, 40), 0, 0, 5)]


def best(priorities: Tensor, among: list[int], topk: int) -> list[int]:
    """Of equal priorities the larger position."""
    values = priorities.tolist()
    return sorted(sorted(among, key=lambda t: (values[t], t))[-topk:])


@pytest.mark.parametrize("case", cases())
def test_one_time_a_token_is_the_top_k_at_every_query(case: tuple) -> None:
    priorities, sinks, window, topk = case
    expires = retained(*case)[1]
    for head in range(2):
        for q in range(priorities.shape[-1]):
            entered = range(sinks, q - window + 1)
            seen = [t for t in entered if expires[0, head, t] > q]
            assert seen == best(priorities[0, head], list(entered), topk)


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("case", cases())
def test_batches_keep_the_same_at_their_ends(case: tuple, every: int) -> None:
    priorities, sinks, window, topk = case
    expires = retained(*case)[1]
    for head in range(2):
        held: list[int] = []
        for q in range(priorities.shape[-1]):
            if q - window >= sinks:
                held.append(q - window)
            if q % every == 0:
                held = best(priorities[0, head], held, topk)
                assert held == [
                    t
                    for t in range(max(0, q - window + 1))
                    if t >= sinks and q < expires[0, head, t]
                ]


@pytest.mark.parametrize("case", cases())
def test_a_cache_that_attends_first_is_the_same_with_the_window_one_larger(case: tuple) -> None:
    """Our caches evict before a token is appended to a full one, by the same choice and ties."""
    priorities, sinks, window, topk = case
    expires = retained(priorities, sinks, window + 1, topk - 1)[1]
    held = [[], []]
    for q in range(priorities.shape[-1]):
        for head in range(2):
            if len(held[head]) == sinks + window + topk:
                at = torch.tensor(held[head], dtype=torch.int32)
                slot = choose_victims(
                    priorities[0, head, at.long()][None, None],
                    at[None, None],
                    torch.tensor([q - 1]),
                    sinks,
                    window,
                    1,
                ).item()
                assert expires[0, head, held[head].pop(int(slot))] == q
            held[head].append(q)
    for head in range(2):
        assert held[head] == (expires[0, head] == NEVER).nonzero().flatten().tolist()


def test_decay_counts_positions_within_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    decay = torch.tensor([0.5, 2.0])
    got = static_priorities(torch.ones(1, 2, 5, dtype=torch.bfloat16), decay, documents)
    assert got.dtype == torch.float32
    assert got[0].tolist() == [[1, 1.5, 2, 1, 1.5], [1, 3, 5, 1, 3]]
