"""Targets against dense attention, with every query of the future counted one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.retention import NEVER
from kvpolicies.learned.boundary import retained
from kvpolicies.learned.targets import Target, future_counts


def dense(
    queries: Tensor, keys: Tensor, softmax: LogitTransform, target: Target, documents: Tensor
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
        (False, LogitTransform(0.5), 1.0, True),
        (True, LogitTransform(0.5, None, torch.linspace(-1, 1, 6).view(2, 3)), 1.0, True),
        (False, LogitTransform(0.5, 2.0), 2.0, False),
        (True, LogitTransform(0.5, None, torch.linspace(-1, 1, 6).view(2, 3)), 3.5, True),
    ],
)
@pytest.mark.parametrize("window", [1, 5, 60])
def test_equal_to_dense_attention(
    window: int, packed: bool, soft: LogitTransform, power: float, per_query: bool
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_sparse_targets_are_those_of_what_is_held(packed: bool, power: float) -> None:
    """Against float64, query by query and key by key: no mask, no logarithm of a sum."""
    g = torch.Generator().manual_seed(3)
    queries, keys = torch.randn(1, 2, 2, 40, 8, generator=g), torch.randn(1, 2, 40, 8, generator=g)
    sink = torch.tensor([[0.3, -1.0], [0.0, 0.5]])
    documents = (torch.rand(1, 40, generator=g) < 0.08).long().cumsum(-1) * int(packed)
    expires = retained(torch.randn(1, 2, 40, generator=g), 1, 5, 4, documents)[1]
    target, soft = Target(5, power=power), LogitTransform(0.5, None, sink)
    found, futures = target(queries, keys, soft, documents, expires)
    logits = soft.scale * torch.einsum("bhgnd,bhld->bhgnl", queries, keys).double()
    worth = torch.zeros(2, 2, 40, dtype=torch.float64)
    above = 0
    for h, i, q in product(range(2), range(2), range(40)):
        old = range(documents[0].tolist().index(documents[0, q].item()), q + 1)
        weight = {t: logits[0, h, i, q, t].exp() for t in old}
        held = [t for t in old if q < expires[0, h, t]]
        assert len(held) <= 10
        total = sink[h, i].double().exp() + sum(weight[t] for t in held)
        for t in old:
            if q >= t + target.delay:
                worth[h, i, t] += (weight[t] / total) ** power
                above += bool(weight[t] > total)
    mean = (worth / futures[0].clamp_min(1)) ** (1 / power)
    expected = torch.logaddexp(mean.log(), torch.tensor(1e-6).double().log()).amax(dim=1)
    torch.testing.assert_close(found[0].double(), expected, atol=1e-5, rtol=0)
    assert above > 0, "nothing was evicted that would have been looked at"
    dense = target(queries, keys, soft, documents)[0]
    assert (found - dense).abs().max() > 0.1
    never = torch.full_like(expires, NEVER)
    assert torch.equal(target(queries, keys, soft, documents, never)[0], dense)


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
