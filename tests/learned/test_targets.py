"""Targets against dense attention, with every query of the future counted one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicies.kernels.softmax import Softmax
from kvpolicies.learned.targets import future_counts, future_targets, targets_of


def dense(
    queries: Tensor, keys: Tensor, softmax: Softmax, delay: int, documents: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean future attention [B, H, G, S] of each key, and N_t [B, S], of whole S x S weights."""
    s = keys.shape[2]
    at = torch.arange(s)
    same = documents[:, :, None] == documents[:, None, :]
    logits = softmax.logits(torch.einsum("bhgnd,bhld->bhgnl", queries, keys))
    sees = (same & (at[None, :] <= at[:, None]))[:, None, None]
    weights = softmax.weights(logits.masked_fill(~sees, -3e38))
    later = same & (at[:, None] >= at[None, :] + delay)
    counted = later.sum(dim=1)
    mass = (weights * later[:, None, None]).sum(dim=-2)
    return mass / counted.clamp_min(1)[:, None, None], counted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [1, 5, 60])
def test_equal_to_dense_attention(window: int, packed: bool) -> None:
    torch.manual_seed(window)
    queries, keys = torch.randn(2, 2, 3, 50, 8), torch.randn(2, 2, 50, 8)
    documents = (torch.rand(2, 50) < 0.08).long().cumsum(-1) * 3
    softmax = Softmax(0.5, None, torch.randn(2, 3) if packed else None)
    given = documents if packed else None
    mean, counted = dense(queries, keys, softmax, window, documents if packed else documents * 0)
    each = torch.logaddexp(mean.log(), torch.tensor(1e-6).log())
    for name, expected in (("max", each.amax(2)), ("mean", each.mean(2)), ("sum", each.sum(2))):
        target, futures = targets_of(queries, keys, softmax, window, given, name)
        torch.testing.assert_close(target, expected, atol=2e-5, rtol=0)
        assert torch.equal(futures.long(), counted) and target.dtype == torch.float32


def test_no_future_has_the_lowest_target() -> None:
    mass = torch.zeros(1, 1, 2, 6)
    mass[..., 4:] = float("-inf")
    target, futures = future_targets(mass, delay=2, eps=1e-4)
    assert futures.tolist() == [[4, 3, 2, 1, 0, 0]]
    assert target[0, 0, 4:].tolist() == pytest.approx([math.log(1e-4)] * 2)
    assert target.isfinite().all() and (target[0, 0, :4] > -2).all()


def test_futures_stay_within_documents() -> None:
    documents = torch.tensor([[7, 7, 7, 7, 8, 9, 9, 9]])
    assert future_counts(documents, 1, documents).tolist() == [[3, 2, 1, 0, 0, 2, 1, 0]]


@pytest.mark.parametrize("wrong", [{"aggregate": "min"}, {"eps": 0.0}, {"delay": -1}])
def test_refusals_take_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^targets: [^\n]*got [^\n]*$"):
        future_targets(torch.zeros(1, 1, 1, 4), wrong.pop("delay", 1), **wrong)
