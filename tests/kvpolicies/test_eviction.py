"""The choice of victims: protection, and ties to the last bit."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicies.eviction import choose_victims, sortable

# Few values, so that ties are the rule; both zeros; infinities; numbers that differ in one bit.
SCORES = [-math.inf, -1.0, -0.0, 0.0, 1e-45, 0.1, 0.10000000149011612, 1.0, 1.0000001, math.inf]


@st.composite
def heads(draw: st.DrawFn) -> tuple[list[float], list[int], int, int, int]:
    length = draw(st.integers(2, 24))
    positions = draw(st.permutations(sorted(draw(st.sets(st.integers(0, 60), min_size=length)))))
    positions = positions[:length]
    scores = draw(st.lists(st.sampled_from(SCORES), min_size=length, max_size=length))
    sinks, window = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    newest = max(positions)
    free = [p for p in positions if sinks <= p <= newest - window]
    return scores, positions, sinks, window, draw(st.integers(0, len(free)))


@settings(max_examples=400, deadline=None)
@given(heads())
def test_equals_plain_python(case: tuple[list[float], list[int], int, int, int]) -> None:
    scores, positions, sinks, window, n_drop = case
    if n_drop == 0:
        return
    scores = torch.tensor(scores).tolist()  # as float32 holds them
    newest = max(positions)
    free = [i for i, p in enumerate(positions) if sinks <= p <= newest - window]
    expected = sorted(free, key=lambda i: (scores[i], positions[i]))[:n_drop]
    got = choose_victims(
        torch.tensor(scores)[None, None],
        torch.tensor(positions, dtype=torch.int32)[None, None],
        torch.tensor([newest]),
        sinks,
        window,
        n_drop,
    )
    assert sorted(got[0, 0].tolist()) == sorted(expected)


def test_larger_position_stays_among_equals() -> None:
    positions = torch.tensor([[[9, 3, 7, 5]]], dtype=torch.int32)
    victims = choose_victims(torch.zeros(1, 1, 4), positions, torch.tensor([9]), 0, 0, 2)
    assert sorted(positions[0, 0, victims[0, 0]].tolist()) == [3, 5]


def test_sortable_keeps_the_order() -> None:
    x = torch.tensor(sorted(SCORES), dtype=torch.float32)
    key = sortable(x + 0.0)
    assert torch.equal(key.sort().values, key)
    assert (key[:-1] < key[1:]).sum() == (x[:-1] < x[1:]).sum()
