"""Targets against dense attention, with every query of the future counted one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicies.kernels.softmax import Softmax
from kvpolicies.learned.targets import Target, future_counts


def dense(
    queries: Tensor, keys: Tensor, softmax: Softmax, target: Target, documents: Tensor
) -> tuple[Tensor, Tensor]:
    """Future attention [B, H, G, S] of each key, and N_t [B, S], of whole S x S weights."""
    s = keys.shape[2]
    at = torch.arange(s)
    same = documents[:, :, None] == documents[:, None, :]
    logits = softmax.logits(torch.einsum("bhgnd,bhld->bhgnl", queries, keys))
    sees = (same & (at[None, :] <= at[:, None]))[:, None, None]
    weights = softmax.weights(logits.masked_fill(~sees, -3e38))
    later = same & (at[:, None] >= at[None, :] + target.delay)
    counted = later.sum(dim=1)
    total = (weights**target.power * later[:, None, None]).sum(dim=-2)
    if target.per_query:
        total = total / counted.clamp_min(1)[:, None, None]
    return total ** (1 / target.power), counted


@pytest.mark.parametrize(
    ("packed", "soft", "power", "per_query"),
    [
        (False, Softmax(0.5), 1.0, True),
        (True, Softmax(0.5, None, torch.linspace(-1, 1, 6).view(2, 3)), 1.0, True),
        (False, Softmax(0.5, 2.0), 2.0, False),
        (True, Softmax(0.5, None, torch.linspace(-1, 1, 6).view(2, 3)), 3.5, True),
    ],
)
@pytest.mark.parametrize("window", [1, 5, 60])
def test_equal_to_dense_attention(
    window: int, packed: bool, soft: Softmax, power: float, per_query: bool
) -> None:
    torch.manual_seed(window)
    queries, keys = torch.randn(2, 2, 3, 50, 8), torch.randn(2, 2, 50, 8)
    documents = (torch.rand(2, 50) < 0.08).long().cumsum(-1) * 3
    given = documents if packed else None
    target = Target(window, power=power, per_query=per_query)
    worth, counted = dense(queries, keys, soft, target, documents if packed else documents * 0)
    each = torch.logaddexp(worth.log(), torch.tensor(1e-6).log())
    for name, expected in (("max", each.amax(2)), ("mean", each.mean(2)), ("sum", each.sum(2))):
        found, futures = replace(target, aggregate=name)(queries, keys, soft, given)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        assert torch.equal(futures.long(), counted) and found.dtype == torch.float32


def test_a_high_power_is_the_strongest_look() -> None:
    """One look of a half beats eight of a tenth, which have more mass."""
    mass = torch.full((1, 1, 1, 10), float("-inf"), dtype=torch.float64)
    for power, better in ((1.0, 1), (4.0, 0)):
        target = Target(1, power=power, per_query=False)
        mass[..., 0], mass[..., 1] = math.log(0.5**power), math.log(8 * 0.1**power)
        assert target.of(mass)[0][0, 0, :2].argmax() == better


def test_no_future_has_the_lowest_target() -> None:
    mass = torch.zeros(1, 1, 2, 6)
    mass[..., 4:] = float("-inf")
    target, futures = Target(2, eps=1e-4).of(mass)
    assert futures.tolist() == [[4, 3, 2, 1, 0, 0]]
    assert target[0, 0, 4:].tolist() == pytest.approx([math.log(1e-4)] * 2)
    assert target.isfinite().all() and (target[0, 0, :4] > -2).all()


def test_futures_stay_within_documents() -> None:
    documents = torch.tensor([[7, 7, 7, 7, 8, 9, 9, 9]])
    assert future_counts(documents, 1, documents).tolist() == [[3, 2, 1, 0, 0, 2, 1, 0]]


@pytest.mark.parametrize(
    "wrong", [{"aggregate": "min"}, {"eps": 0.0}, {"delay": -1}, {"power": 0.5}]
)
def test_refusals_take_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^targets: [^\n]*got [^\n]*$"):
        Target(**{"delay": 1, **wrong})
