"""Hole filling: survivors stay intact, and no more moves than slots are freed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicies.kernels.compact import compact


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.data())
def test_survivors_fill_the_front(length: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, length))
    capacity = length + data.draw(st.integers(0, 5))
    picks = [data.draw(st.permutations(range(length)))[:n] for _ in range(4)]
    victims = torch.tensor(picks).view(2, 2, n)
    keys = torch.arange(2 * 2 * capacity * 3.0).view(2, 2, capacity, 3)
    positions = torch.arange(capacity).expand(2, 2, capacity).clone()
    keys_before, behind = keys.clone(), keys[:, :, length:].clone()
    source, destination = compact([keys, positions], victims, length)
    assert int((source != destination).sum(-1).max()) <= n
    assert torch.equal(keys[:, :, length:], behind), "slots behind the filled ones were touched"
    for b in range(2):
        for h in range(2):
            kept = positions[b, h, : length - n].tolist()
            assert sorted(kept) == sorted(set(range(length)) - set(victims[b, h].tolist()))
            assert torch.equal(keys[b, h, : length - n], keys_before[b, h, kept])


def test_what_need_not_move_does_not() -> None:
    positions = torch.arange(10)[None, None].clone()
    compact([positions], torch.tensor([[[2, 9, 8]]]), 10)
    # Of the tail 7, 8, 9 only 7 survives; it fills the one hole; the rest stays where it was.
    assert positions[0, 0, :7].tolist() == [0, 1, 7, 3, 4, 5, 6]


def test_works_in_place_on_views() -> None:
    whole = torch.arange(24.0).view(3, 1, 8)
    compact([whole[1:2]], torch.tensor([[[0]]]), 8)
    assert whole[1, 0, 0] == 15 and torch.equal(whole[0, 0], torch.arange(8.0))
