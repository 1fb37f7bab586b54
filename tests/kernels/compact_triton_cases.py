"""Hole filling, Triton's in the interpreter: the reference's plan, and its moves."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.kernels.compact import compact
from tests.kernels.support_triton import generator, on_triton


@pytest.mark.parametrize(
    "length, n", [(1, 1), (9, 1), (9, 9), (40, 7), (90, 64), (150, 70), (200, 130)]
)
def test_the_same_plan_and_the_same_moves(length: int, n: int) -> None:
    g = generator(n)
    victims = torch.rand(2, 3, length, generator=g).argsort(-1)[..., :n]
    slots = length + 2
    whole = [
        torch.randn(3, 3, slots, 80, generator=g).to(torch.bfloat16),
        torch.randn(3, 3, slots, 32, generator=g),
        torch.randn(3, 3, slots, generator=g),
        torch.randint(999, (3, 3, slots), generator=g, dtype=torch.int32),
    ]
    ours = [x.clone() for x in whole]
    expected = compact([x[1:] for x in whole], victims, length)
    with on_triton():
        got = compact([x[1:] for x in ours], victims, length)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    for mine, reference in zip(ours, whole, strict=True):
        assert torch.equal(mine, reference)


def test_several_layers_at_once() -> None:
    g = generator(1)
    victims = torch.rand(2, 2, 3, 20, generator=g).argsort(-1)[..., :6]
    whole = [torch.randn(3, 4, 3, 24, 16, generator=g), torch.randn(3, 4, 3, 24, generator=g)]
    ours, alone = [x.clone() for x in whole], [x.clone() for x in whole]
    compact([x[1:, 1:3] for x in whole], victims, 20)
    with on_triton():
        compact([x[1:, 1:3] for x in ours], victims, 20)
    for layer in range(2):
        compact([x[1 + layer, 1:3] for x in alone], victims[layer], 20)
    for mine, reference, one in zip(ours, whole, alone, strict=True):
        assert torch.equal(mine, reference) and torch.equal(one, reference)
