"""The recents that look at an eviction are the newest queries: at any budget, for any selector."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.beacon.policy import MEMORIES
from kvpolicies.budget import Budget
from tests.beacon.feeding import feed, layer_for, random_queries, rope

CHOICES = [(refresh, selector) for refresh, of in MEMORIES.items() for selector in of]
QUERIES = random_queries(1, 2, 2, 80, 8)


@pytest.mark.parametrize("prompt", [1, 40])
@pytest.mark.parametrize("total", [6, 17, 64])
@pytest.mark.parametrize("refresh, selector", CHOICES)
def test_the_newest_queries_look(refresh: str, selector: str, total: int, prompt: int) -> None:
    """An eviction frees an eighth: from 64 slots on as many as the recents, below fewer."""
    spec = f"beacon(n_beacon=3, n_recent=8, selector={selector!r}, refresh={refresh!r})"
    layer = layer_for(spec, QUERIES, Budget(total, 1, 2), rope=rope(8), length=80)
    fed, looked = 0, 0
    for size in [prompt, *[1] * (79 - prompt)]:
        feed_part(layer, fed, size)
        fed += size
        if layer.lengths[0] < total:
            continue  # Nothing goes before the next token.
        queries, positions, valid = layer.policy.memory.looking(layer.view(slice(0, 1)))  # type: ignore[attr-defined]
        looking = positions[0][valid[0]].tolist()
        newest = list(range(max(0, fed - 8), fed))
        assert set(looking) == set(newest)  # beacons look from the newest position, too
        assert len(looking) == len(newest) + min(3, fed - len(newest))
        recents = [looking.index(position) for position in newest[:-1]]
        own = QUERIES[0, :, :, newest[:-1]]
        assert torch.equal(queries[0][:, :, valid[0]][:, :, recents], own)
        looked += 1
    assert looked > 1


def feed_part(layer, first: int, n: int) -> None:
    """Brings QUERIES[first : first + n] in one forward."""
    feed(layer, QUERIES[:, :, :, first : first + n], [n])
