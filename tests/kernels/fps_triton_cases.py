"""Farthest points, Triton's in the interpreter: the reference's own choice."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.kernels.fps import farthest_points
from tests.kernels.support_triton import generator, on_triton


@pytest.mark.parametrize(
    "heads, n, d, m, dtype",
    [
        ((1, 1), 1, 32, 1, torch.float32),
        ((2, 2), 32, 64, 16, torch.bfloat16),
        ((1, 2), 33, 80, 33, torch.float32),
        ((1,), 64, 300, 9, torch.float32),
        ((2,), 65, 32, 12, torch.bfloat16),
        ((1,), 150, 96, 8, torch.float32),
    ],
)
def test_the_same_choice(heads: tuple, n: int, d: int, m: int, dtype: torch.dtype) -> None:
    queries = torch.randn(*heads, n, d, generator=generator(n)).to(dtype)
    expected = farthest_points(queries, m)
    with on_triton():
        got = farthest_points(queries, m)
    assert got.dtype == torch.int64 and torch.equal(got, expected)


@pytest.mark.parametrize("n", [20, 70])
@pytest.mark.parametrize("seed", range(3))
def test_ties_go_to_the_smaller_index(n: int, seed: int) -> None:
    """Signed axes of lengths 1, 2 and 4: cosines are exact, and ties are the rule."""
    g = generator(seed)
    axes = torch.eye(4)[torch.randint(4, (2, n), generator=g)]
    queries = axes * torch.tensor([-4, -2, -1, 1, 2, 4])[torch.randint(6, (2, n, 1), generator=g)]
    with on_triton():
        got = farthest_points(queries, 12)
    assert torch.equal(got, farthest_points(queries, 12))


@pytest.mark.parametrize("n", [20, 70])
def test_of_equal_queries_each_comes_once(n: int) -> None:
    with on_triton():
        assert farthest_points(torch.ones(1, n, 4), 9).tolist() == [list(range(9))]


@pytest.mark.parametrize("n", [20, 70])
def test_what_is_not_a_number_still_gives_indices(n: int) -> None:
    queries = torch.ones(1, n, 4)
    queries[0, 3] = float("nan")
    with on_triton():
        got = farthest_points(queries, 9)[0]
    assert len(set(got.tolist())) == 9 and int(got.min()) >= 0 and int(got.max()) < n
