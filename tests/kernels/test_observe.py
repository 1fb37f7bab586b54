"""The plain-torch kernels against loops: observation, redundancy, attention, farthest points."""

from types import ModuleType

import numpy as np
import pytest
import torch

from kvpolicies.kernels import attention
from kvpolicies.kernels.attention import SlotMask, slot_attention, slot_attention_with_weights
from kvpolicies.kernels.fps import farthest_points
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.redundancy import BLOCK, key_redundancy
from kvpolicies.kernels.weights import observation_weights


def test_observation_weights_of_queries_that_are_not_there_are_zero() -> None:
    g = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(1, 1, 2, 3, 8, generator=g), torch.randn(1, 1, 5, 8, generator=g)
    positions = torch.tensor([[[4, 0, 9, 2, 7]]])
    when, valid = torch.tensor([[3, 9, 5]]), torch.tensor([[True, True, False]])
    weights = observation_weights(queries, keys, when, positions, 0.5, valid)
    assert torch.equal(
        weights[0, 0, :, 0] > 0, torch.tensor([[False, True, False, True, False]] * 2)
    )
    assert torch.allclose(weights[0, 0, :, :2].sum(-1), torch.ones(2, 2))
    assert weights[0, 0, :, 2].abs().max() == 0
    early = observation_weights(queries, keys, torch.full((1, 3), -1), positions, 0.5)
    assert early.abs().max() == 0


def test_nan_reaches_the_caller() -> None:
    keys = torch.zeros(1, 1, 4, 8)
    keys[0, 0, 2, 3] = float("nan")
    positions = torch.arange(4)[None, None]
    weights = observation_weights(
        torch.ones(1, 1, 1, 1, 8), keys, torch.tensor([[9]]), positions, 1.0
    )
    assert weights.isnan().any()


@pytest.mark.parametrize("beta", [0, 1, 2, 50])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 131, 300])
def test_redundancy(length: int, beta: int, reference: ModuleType) -> None:
    if length == 300 and beta != 1:
        pytest.skip("one large case is enough")
    rng = np.random.default_rng(length)
    base = rng.standard_normal((7, 16))
    keys = (base[rng.integers(7, size=length)] + 0.2 * rng.standard_normal((length, 16))).astype(
        "f4"
    )
    positions = rng.permutation(2 * length)[:length]
    if reference.rkv_threshold_gap(keys.astype(float)) < 1e-6:
        pytest.skip("a cosine too close to the threshold")
    expected = reference.rkv_redundancy(keys.astype(float), positions, beta=beta)
    ours = key_redundancy(torch.tensor(keys)[None, None], torch.tensor(positions)[None, None], beta)
    np.testing.assert_allclose(ours[0, 0].numpy(), expected, rtol=1e-4)


def test_redundancy_memory_is_not_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of L x L numbers is ever made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    length = 1500
    with Watch():
        key_redundancy(torch.randn(1, 1, length, 8), torch.arange(length)[None, None])
    assert 0 < largest <= BLOCK * length


@pytest.mark.parametrize("block", [2, 256])
def test_attention_with_and_without_weights(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, 2, 5, 16, generator=g)
    k, v = torch.randn(2, 2, 3, 9, 16, generator=g)
    last = torch.tensor([[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]])
    out = slot_attention(q, k, v, SlotMask(last), LogitTransform(0.3))
    same, weights = slot_attention_with_weights(q, k, v, SlotMask(last), LogitTransform(0.3))
    assert torch.allclose(out, same, atol=1e-6)
    for b in range(2):
        for i in range(5):
            n = int(last[b, i]) + 1
            logits = 0.3 * torch.einsum("hgd,hld->hgl", q[b, :, :, i], k[b, :, :n])
            assert torch.allclose(weights[b, :, :, i, :n], logits.softmax(-1), atol=1e-6)
            assert weights[b, :, :, i, n:].abs().sum() == 0


@pytest.mark.parametrize("block", range(10))
def test_farthest_points(block: int, reference: ModuleType) -> None:
    compared = 0
    for seed in range(20 * block, 20 * block + 20):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 70))
        if seed % 2:  # signed axes of lengths 1, 2, 4: cosines are exact, and ties are the rule
            queries = np.eye(4)[rng.integers(4, size=n)] * rng.choice([-4, -2, -1, 1, 2, 4], (n, 1))
        else:  # random directions, a third of them exact copies
            queries = rng.standard_normal((n, 16))
            queries = queries[np.where(rng.random(n) < 0.3, rng.integers(n, size=n), np.arange(n))]
        queries = queries.astype("f4")
        m = int(rng.integers(1, n))
        expected, gap = reference.fps_with_gap(queries.astype(float), m)
        if 0 < gap < 1e-6:
            continue  # a near-tie that float32 may decide otherwise
        assert farthest_points(torch.tensor(queries), m).tolist() == list(expected), f"seed {seed}"
        compared += 1
    assert compared >= 15


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("span", [None, 3])
def test_capped_sunk_and_sliding_attention_against_plain_numpy(
    cap: float | None, with_sink: bool, span: int | None
) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 3, 300, 8, generator=g), torch.randn(1, 2, 310, 8, generator=g)
    v, sink = torch.randn(1, 2, 310, 8, generator=g), torch.randn(2, 3, generator=g)
    softmax = LogitTransform(0.5, cap, sink if with_sink else None)
    last = 10 + torch.arange(300)[None]
    where = torch.arange(310)[None]
    visible = SlotMask(last) if span is None else SlotMask(last, last - span + 1, where)
    out = slot_attention(q, k, v, visible, softmax)
    for h, group, i in [(0, 0, 0), (1, 2, 150), (0, 1, 255), (1, 0, 256), (1, 1, 299)]:
        seen = slice(0 if span is None else int(last[0, i]) - span + 1, int(last[0, i]) + 1)
        x = 0.5 * k[0, h, seen].double().numpy() @ q[0, h, group, i].double().numpy()
        x = x if cap is None else cap * np.tanh(x / cap)
        e = np.exp(x)
        weights = e / (e.sum() + (np.exp(float(sink[h, group])) if with_sink else 0))
        expected = weights @ v[0, h, seen].double().numpy()
        np.testing.assert_allclose(out[0, h, group, i].numpy(), expected, atol=2e-6)
    same, _ = slot_attention_with_weights(q, k, v, visible, softmax)
    torch.testing.assert_close(out, same, atol=2e-6, rtol=0)
