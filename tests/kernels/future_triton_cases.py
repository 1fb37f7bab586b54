"""Future attention mass, Triton's in the interpreter against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicies.kernels import future
from kvpolicies.kernels.causal import causal_lse
from kvpolicies.kernels.future import future_log_mass
from kvpolicies.kernels.logit_transform import LogitTransform
from tests.kernels.support_triton import close, generator, on_triton

bf16, f32 = torch.bfloat16, torch.float32
# Logits come to 20, where float32 ends at 2e-6: a few of these. Where float32 meets 16 bits, it is
# taken at a mantissa of 16 bits.
TOLERANCE = {True: 1e-5, False: 2e-4}

# B, H, G, S, D, queries, keys, cap, sink, delays
SHAPES = [
    (1, 1, 1, 1, 32, f32, f32, None, False, (1,)),
    (2, 1, 3, 70, 64, f32, f32, None, False, (1, 69)),
    (1, 2, 1, 140, 80, bf16, bf16, 2.0, True, (3, 120)),
    (2, 1, 2, 150, 96, f32, bf16, None, True, (16,)),
    (1, 1, 4, 50, 128, f32, f32, 2.0, True, (7,)),
    (1, 1, 2, 330, 128, bf16, bf16, None, False, (1, 64)),
    (1, 1, 7, 65, 256, bf16, bf16, None, False, (5,)),
    (1, 1, 1, 49, 256, f32, f32, None, True, (1, 1000)),
    (1, 1, 8, 40, 32, bf16, bf16, None, False, (2,)),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_as_the_reference(shape: tuple) -> None:
    b, h, g, length, d, query_type, key_type, cap, sink, delays = shape
    seed = generator(length)
    # Rows as a model has them: heads side by side, so that nothing is contiguous.
    queries = torch.randn(b, length, h, g, d, generator=seed).to(query_type).permute(0, 2, 3, 1, 4)
    keys = torch.randn(b, h, length + 3, d, generator=seed).to(key_type)[:, :, :length]
    softmax = LogitTransform(2 * d**-0.5, cap, torch.randn(h, g, generator=seed) if sink else None)
    documents = torch.randint(0, 4, (b, length), generator=seed).sort().values
    for packed in (None, documents):
        lse = causal_lse(queries, keys, softmax, packed)
        for delay in delays:
            args = (queries, keys, lse, softmax, delay, packed)
            expected = future_log_mass(*args)
            with on_triton():
                got = future_log_mass(*args)
            close(got, expected, TOLERANCE[query_type == key_type])


@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (32, 32)])
def test_the_tile_does_not_matter(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end within a tile, with it, and far behind it; one row of one document."""
    seed = generator(0)
    queries, keys = torch.randn(2, 1, 1, 200, 32, generator=seed), torch.randn(2, 1, 200, 32)
    starts = torch.zeros(2, 200, dtype=torch.int32)
    starts[0, [5, 6, 32, 64, 150, 199]] = 1
    documents, softmax = starts.cumsum(1), LogitTransform(0.2)
    lse = causal_lse(queries, keys, softmax, documents)
    args = (queries, keys, lse, softmax, 11, documents)
    expected = future_log_mass(*args)
    assert (expected == -math.inf).sum() == 5 + 1 + 4 * 11 + 1 + 11
    monkeypatch.setitem(future.BLOCKS, (4, 64), (*tile, 4))
    with on_triton():
        close(future_log_mass(*args), expected, 4e-6)


def test_logits_far_below_their_sum_do_not_vanish() -> None:
    """Shares of exp(-200), which float32 does not hold, have a logarithm all the same."""
    queries, keys = torch.ones(1, 1, 1, 40, 32), torch.zeros(1, 1, 40, 32)
    with on_triton():
        mass = future_log_mass(
            queries, keys, torch.full((1, 1, 1, 40), 200.0), LogitTransform(1.0), 1
        )
    expected = torch.arange(39, 0, -1).log() - 200
    close(mass[0, 0, 0, :39], expected, 2e-5)
    assert mass[..., 39] == -math.inf


def test_what_is_not_a_number_comes_through() -> None:
    queries, keys = torch.ones(1, 2, 2, 40, 32), torch.ones(1, 2, 40, 32)
    lse = causal_lse(queries, keys, LogitTransform(0.1))
    queries[0, 1, 1, 20, 7] = float("nan")
    with on_triton():
        mass = future_log_mass(queries, keys, lse, LogitTransform(0.1), 4)
    bad = torch.zeros(1, 2, 2, 40, dtype=torch.bool)
    bad[0, 1, 1, :17] = True
    assert torch.equal(mass.isnan(), bad)
