"""Decode attention, Triton's in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.kernels.attention import SlotMask, slot_attention, slot_attention_with_weights
from kvpolicies.kernels.decode import decode_attention
from kvpolicies.kernels.logit_transform import LogitTransform
from tests.kernels.support_triton import close, generator, on_triton

bf16, f32 = torch.bfloat16, torch.float32

# B, H, G, C, D, dtype, cap, sink
SHAPES = [
    (1, 1, 1, 1, 32, f32, None, False),
    (2, 2, 3, 70, 64, f32, None, True),
    (3, 1, 5, 65, 80, bf16, 2.0, False),
    (1, 2, 8, 33, 96, bf16, None, True),
    (2, 1, 4, 64, 128, f32, 2.0, True),
    (1, 1, 7, 130, 128, bf16, None, False),
    (1, 1, 2, 40, 256, bf16, None, False),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_output_lse_and_weights(shape: tuple) -> None:
    b, h, g, slots, d, dtype, cap, sink = shape
    seed = generator(slots)
    queries = torch.randn(b, h, g, 1, d, generator=seed).to(dtype)
    keys, values = torch.randn(2, b, h, slots + 2, d, generator=seed).to(dtype)[:, :, :, :slots]
    softmax = LogitTransform(2 * d**-0.5, cap, torch.randn(h, g, generator=seed) if sink else None)
    lengths = torch.randint(slots // 2, slots + 1, (b,), generator=seed, dtype=torch.int32)
    for filled, wanted in ((lengths, True), (None, False)):
        args = (queries, keys, values, filled, softmax)
        expected = decode_attention(*args, weights=wanted)
        with on_triton():
            got = decode_attention(*args, weights=wanted)
        # The output is rounded to its own dtype, the rest is float32.
        close(got.out, expected.out, 2e-6 if dtype == f32 else 8e-3)
        close(got.lse, expected.lse, 2e-6)
        assert (got.weights is None) == (not wanted)
        if got.weights is not None and expected.weights is not None:
            close(got.weights, expected.weights, 1e-6)


@pytest.mark.parametrize("sink", [None, torch.ones(1, 2)])
def test_an_empty_row_and_what_lies_behind_the_filled_slots(sink: torch.Tensor | None) -> None:
    seed = generator(0)
    queries = torch.randn(2, 1, 2, 1, 32, generator=seed)
    keys, values = torch.randn(2, 2, 1, 40, 32, generator=seed)
    keys[:, :, 36:] = values[:, :, 36:] = float("nan")
    args = (queries, keys, values, torch.tensor([0, 36]), LogitTransform(0.2, None, sink))
    with on_triton():
        got = decode_attention(*args, weights=True)
    assert got.weights is not None
    assert got.out[0].abs().max() == 0 and got.weights[0].abs().max() == 0
    assert got.weights[1, :, :, 36:].abs().max() == 0
    whole = decode_attention(queries[1:], keys[1:, :, :36], values[1:, :, :36], None, args[-1])
    close(got.out[1:], whole.out, 2e-6)
    assert torch.equal(got.lse[0].isinf(), torch.full((1, 2), sink is None))


@pytest.mark.parametrize("span", [None, 7])
def test_it_serves_one_new_token(span: int | None) -> None:
    """`slot_attention` and its form with weights hand n = 1 over to it."""
    seed = generator(1)
    queries = torch.randn(2, 2, 3, 1, 32, generator=seed)
    keys, values = torch.randn(2, 2, 2, 36, 32, generator=seed)
    last = torch.tensor([[35], [20]])
    at = torch.arange(36).expand(2, -1)
    for limit in (last, last[:1], None):
        visible = SlotMask(limit)
        if span is not None:
            visible = SlotMask(limit, last - span + 1, at)
        args = (queries, keys, values, visible, LogitTransform(0.3, 3.0))
        expected, weights = slot_attention_with_weights(*args)
        with on_triton():
            got, row = slot_attention_with_weights(*args)
            close(slot_attention(*args), expected, 2e-6)
        close(got, expected, 2e-6)
        close(row, weights, 1e-6)


def test_what_is_not_a_number_comes_through() -> None:
    queries, keys, values = torch.ones(1, 1, 2, 1, 32), torch.ones(1, 1, 70, 32), torch.ones(1)
    keys[0, 0, 3, 3] = float("nan")
    values = torch.ones_like(keys)
    with on_triton():
        got = decode_attention(queries, keys, values, None, LogitTransform(0.2), weights=True)
    assert got.weights is not None
    assert got.out.isnan().all() and got.lse.isnan().all() and got.weights.isnan().all()
