"""Future attention mass and the causal log-sum-exp in torch, against dense float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvpolicies.kernels import causal, future
from kvpolicies.kernels.causal import causal_lse
from kvpolicies.kernels.future import future_log_mass
from kvpolicies.kernels.logit_transform import LogitTransform

LENGTHS = (1, 2, 63, 100, 257)


class Inputs(NamedTuple):
    queries: Tensor
    keys: Tensor
    softmax: LogitTransform
    documents: Tensor | None


def inputs(
    length: int, groups: int = 2, d: int = 16, cap: bool = False, sink: bool = False,
    packed: bool = False, rows: int = 2, heads: int = 2,
) -> Inputs:  # fmt: skip
    g = torch.Generator().manual_seed(length + groups)
    queries = torch.randn(rows, heads, groups, length, d, generator=g)
    keys = torch.randn(rows, heads, length, d, generator=g)
    sinks = torch.randn(heads, groups, generator=g) if sink else None
    documents = None
    if packed:  # numbers that do not start at 0 and leave some out
        documents = torch.randint(0, 6, (rows, length), generator=g).sort().values * 3 - 4
    return Inputs(
        queries, keys, LogitTransform(2 * d**-0.5, 1.5 if cap else None, sinks), documents
    )


def dense(x: Inputs, delay: int) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each query and the future mass of each key, float64, S x S."""
    length = x.keys.shape[2]
    logits = torch.einsum("bhgnd,bhld->bhgnl", x.queries.double(), x.keys.double())
    logits = logits * x.softmax.scale
    if x.softmax.cap is not None:
        logits = x.softmax.cap * torch.tanh(logits / x.softmax.cap)
    same = torch.ones(1, length, length, dtype=torch.bool)
    if x.documents is not None:
        same = x.documents[:, :, None] == x.documents[:, None, :]
    n, t = torch.arange(length)[:, None], torch.arange(length)
    past = logits.masked_fill(~(same & (t <= n))[:, None, None], -math.inf)
    total = past.exp().sum(-1)
    if x.softmax.sink is not None:
        total = total + x.softmax.sink.double().exp()[None, :, :, None]
    share = logits.exp() / total[..., None]
    share = share * (same & (n >= t + delay))[:, None, None]
    return total.log(), share.sum(dim=-2).log()


def check(x: Inputs, delay: int) -> None:
    lse = causal_lse(x.queries, x.keys, x.softmax, x.documents)
    mass = future_log_mass(x.queries, x.keys, lse, x.softmax, delay, x.documents)
    assert lse.dtype == mass.dtype == torch.float32
    expected_lse, expected = dense(x, delay)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)
    torch.testing.assert_close(mass.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_as_dense_attention(length: int, packed: bool) -> None:
    for delay in (1, 2, 17, 64, 256, 257, 1000):
        check(inputs(length, packed=packed), delay)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("cap", [False, True])
def test_soft_caps_sinks_and_documents(cap: bool, sink: bool, packed: bool) -> None:
    for length in (63, 257):
        check(inputs(length, cap=cap, sink=sink, packed=packed), 5)


@pytest.mark.parametrize("groups", range(1, 9))
def test_any_number_of_query_heads(groups: int) -> None:
    check(inputs(100, groups, packed=True, cap=True, sink=True), 9)


def test_of_16_bit_numbers() -> None:
    """The products are of the rounded numbers; everything behind them is float32."""
    x = inputs(100, packed=True)
    rounded = x._replace(queries=x.queries.bfloat16(), keys=x.keys.bfloat16())
    check(rounded, 9)


@pytest.mark.parametrize("packed", [False, True])
def test_shares_sum_to_the_number_of_queries(packed: bool) -> None:
    """Every query gives one in all; a delay of 1 withholds what it gives to its own key."""
    x = inputs(257, packed=packed)
    lse = causal_lse(x.queries, x.keys, x.softmax, x.documents)
    given = {
        delay: future_log_mass(x.queries, x.keys, lse, x.softmax, delay, x.documents).exp().sum(-1)
        for delay in (0, 1)
    }
    assert (given[0] - 257).abs().max() < 1e-3
    own = (x.queries * x.keys[:, :, None]).sum(-1) * x.softmax.scale - lse
    assert (given[1] + own.exp().sum(-1) - 257).abs().max() < 1e-3


def test_a_document_alone_is_a_document_packed() -> None:
    x = inputs(100)
    cut = 37
    documents = (torch.arange(100) >= cut).long().expand(2, -1)
    lse = causal_lse(x.queries, x.keys, x.softmax, documents)
    mass = future_log_mass(x.queries, x.keys, lse, x.softmax, 6, documents)
    for part in (slice(0, cut), slice(cut, None)):
        queries, keys = x.queries[:, :, :, part], x.keys[:, :, part]
        alone = causal_lse(queries, keys, x.softmax)
        torch.testing.assert_close(lse[..., part], alone, atol=2e-6, rtol=0)
        of_it = future_log_mass(queries, keys, alone, x.softmax, 6)
        torch.testing.assert_close(mass[..., part], of_it, atol=4e-6, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_the_block_does_not_matter(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(100, packed=packed, sink=True)
    results = []
    for block in (1, 7, 64, 1000):
        monkeypatch.setattr(causal, "BLOCK", block)
        monkeypatch.setattr(future, "BLOCK", block)
        lse = causal_lse(x.queries, x.keys, x.softmax, x.documents)
        mass = future_log_mass(x.queries, x.keys, lse, x.softmax, 5, x.documents)
        results.append((lse, mass))
    for lse, mass in results[1:]:
        torch.testing.assert_close(lse, results[0][0], atol=2e-6, rtol=0)
        torch.testing.assert_close(mass, results[0][1], atol=4e-6, rtol=0)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made inside has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.numel())
        return out


@pytest.mark.parametrize("packed", [False, True])
def test_memory_grows_with_the_length_not_its_square(packed: bool) -> None:
    largest = []
    for length in (2048, 4096):
        x = inputs(length, groups=2, d=4, packed=packed, rows=1, heads=1)
        with Largest() as seen:
            lse = causal_lse(x.queries, x.keys, x.softmax, x.documents)
            future_log_mass(x.queries, x.keys, lse, x.softmax, 16, x.documents)
        assert 0 < seen.numel <= 2 * 128 * length
        largest.append(seen.numel)
    assert packed or largest[1] < 2.1 * largest[0]


def test_what_is_not_a_number_comes_through() -> None:
    x = inputs(20)
    lse = causal_lse(x.queries, x.keys, x.softmax)
    lse[0, 1, 0, 12] = math.nan
    mass = future_log_mass(x.queries, x.keys, lse, x.softmax, 3)
    bad = torch.zeros_like(mass, dtype=torch.bool)
    bad[0, 1, 0, :10] = True
    assert torch.equal(mass.isnan(), bad)


def test_a_query_does_not_see_what_comes_after_it() -> None:
    x = inputs(5)
    lse = torch.zeros(2, 2, 2, 5)
    with pytest.raises(ValueError, match="delay must be at least 0, got -1"):
        future_log_mass(x.queries, x.keys, lse, x.softmax, -1)
