"""The log-sum-exp of causal attention, Triton's in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.kernels import causal
from kvpolicies.kernels.causal import causal_lse
from kvpolicies.kernels.logit_transform import LogitTransform
from tests.kernels.support_triton import close, generator, on_triton

bf16, f32 = torch.bfloat16, torch.float32
# Logits come to 20, where float32 ends at 2e-6: a few of these. Where float32 meets 16 bits, it is
# taken at a mantissa of 16 bits.
TOLERANCE = {True: 1e-5, False: 2e-4}

# B, H, G, S, D, queries, keys, cap, sink
SHAPES = [
    (1, 1, 1, 1, 32, f32, f32, None, False),
    (2, 1, 3, 70, 64, f32, f32, None, False),
    (1, 2, 1, 140, 80, bf16, bf16, 2.0, True),
    (2, 1, 2, 150, 96, f32, bf16, None, True),
    (1, 1, 4, 50, 128, f32, f32, 2.0, True),
    (1, 1, 2, 260, 128, bf16, bf16, None, False),
    (1, 1, 7, 65, 256, bf16, bf16, None, False),
    (1, 1, 1, 49, 256, f32, f32, None, True),
    (1, 1, 8, 40, 32, bf16, bf16, None, False),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_as_the_reference(shape: tuple) -> None:
    b, h, g, length, d, query_type, key_type, cap, sink = shape
    seed = generator(length)
    # Rows as a model has them: heads side by side, so that nothing is contiguous.
    queries = torch.randn(b, length, h, g, d, generator=seed).to(query_type).permute(0, 2, 3, 1, 4)
    keys = torch.randn(b, h, length + 3, d, generator=seed).to(key_type)[:, :, :length]
    softmax = LogitTransform(2 * d**-0.5, cap, torch.randn(h, g, generator=seed) if sink else None)
    documents = torch.randint(0, 4, (b, length), generator=seed).sort().values
    alive = torch.randint(1, 60, (b, h, length), generator=seed, dtype=torch.int32)
    expires = torch.arange(length, dtype=torch.int32) + alive
    for packed, gone in ((None, None), (documents, None), (None, expires), (documents, expires)):
        expected = causal_lse(queries, keys, softmax, packed, gone)
        with on_triton():
            got = causal_lse(queries, keys, softmax, packed, gone)
        close(got, expected, TOLERANCE[query_type == key_type])


@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (32, 32)])
def test_the_tile_does_not_matter(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that begin within a tile, with it, and far before it; one row of one document."""
    seed = generator(0)
    queries, keys = torch.randn(2, 1, 1, 200, 32, generator=seed), torch.randn(2, 1, 200, 32)
    starts = torch.zeros(2, 200, dtype=torch.int32)
    starts[0, [5, 6, 32, 64, 150, 199]] = 1
    # Some tokens leave at once, so that whole tiles are gone; others never do.
    expires = torch.where(torch.arange(200) % 90 < 80, torch.arange(200) + 1, 1 << 30)
    args = (queries, keys, LogitTransform(0.2), starts.cumsum(1), expires.int().expand(2, 1, 200))
    expected = causal_lse(*args)
    monkeypatch.setitem(causal.BLOCKS, (4, 64), (*tile, 4))
    with on_triton():
        close(causal_lse(*args), expected, 4e-6)


def test_what_is_not_a_number_comes_through() -> None:
    queries, keys = torch.ones(1, 2, 2, 40, 32), torch.ones(1, 2, 40, 32)
    keys[0, 1, 20, 7] = float("nan")
    with on_triton():
        lse = causal_lse(queries, keys, LogitTransform(0.1))
    bad = torch.zeros(1, 2, 2, 40, dtype=torch.bool)
    bad[0, 1, :, 20:] = True
    assert torch.equal(lse.isnan(), bad)
