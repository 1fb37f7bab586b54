"""Boundaries and eviction times, Triton's Fenwick tree in the interpreter against brute force."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.kernels.retention import retain
from tests.kernels.support_triton import generator, on_triton
from tests.support.retention import brute_force, random_case


@pytest.mark.parametrize("block", range(5))
def test_equal_to_brute_force(block: int) -> None:
    """500 rows in calls of ten, some of several documents, many ties."""
    for seed in range(10 * block, 10 * block + 10):
        case = random_case(seed, rows=10, longest=14)
        with on_triton():
            got = retain(*case)
        expected = brute_force(case)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]), seed


@pytest.mark.parametrize("length", [127, 128, 129])
def test_longer_rows(length: int) -> None:
    priorities = torch.randn(1, length, generator=generator(length))
    expected = retain(priorities, 4, 9, 30)
    with on_triton():
        got = retain(priorities, 4, 9, 30)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_no_token_and_no_row() -> None:
    with on_triton():
        for shape in ((0, 5), (3, 0)):
            assert retain(torch.zeros(shape), 0, 1, 2)[1].shape == shape
