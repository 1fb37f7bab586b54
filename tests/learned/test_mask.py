"""Masks from eviction times against every pair tried."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kvpolicies.kernels.retention import NEVER
from kvpolicies.learned.boundary import retained
from kvpolicies.learned.mask import block_mask, dense_mask


def made(length: int, window: int, packed: bool, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """expires [2, 2, S] of random priorities, and documents [2, S] of odd lengths."""
    torch.manual_seed(seed)
    documents = None
    if packed:
        documents = (torch.rand(2, length) < 5 / length).long().cumsum(-1) + (1 << 40)
    return retained(torch.randn(2, 2, length), 3, window, 17, documents)[1], documents


def listed(mask: BlockMask) -> list[Tensor]:
    """What is defined of a mask's lists of blocks: numbers, and columns as a table."""
    out = []
    for counts, columns in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.q_num_blocks, mask.q_indices),
        (mask.full_q_num_blocks, mask.full_q_indices),
    ):
        assert counts is not None and columns is not None
        named = torch.arange(columns.shape[-1]) < counts[..., None]
        out += [counts, columns.masked_fill(~named, -1)]
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 1, 40, 200])
@pytest.mark.parametrize("length", [1, 63, 128, 300, 512])
def test_blocks_equal_to_every_pair_tried(length: int, window: int, packed: bool) -> None:
    for block in (32, 128):
        expires, documents = made(length, window, packed, seed=length + window)
        got = block_mask(expires, documents, groups=3, block=block)
        brute = create_block_mask(
            got.mask_mod, 2, 6, length, length, device="cpu", BLOCK_SIZE=block
        )
        for a, b in zip(listed(got), listed(brute), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        assert got.seq_lengths == brute.seq_lengths and got.BLOCK_SIZE == brute.BLOCK_SIZE


def test_full_and_empty_blocks_are_found() -> None:
    """Kept for good by everyone, or gone before the next block begins."""
    expires = torch.full((1, 1, 512), NEVER, dtype=torch.int32)
    expires[..., 128:256] = 256
    mask = block_mask(expires)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 1, 2]
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("packed", [False, True])
def test_the_dense_mask_is_the_definition(packed: bool) -> None:
    expires, documents = made(50, 6, packed)
    mask = dense_mask(expires, documents)
    for b, h, q, t in torch.cartesian_prod(*[torch.arange(n) for n in (2, 2, 50, 50)]).tolist():
        same = documents is None or documents[b, q] == documents[b, t]
        assert mask[b, h, q, t] == (t <= q < expires[b, h, t] and bool(same))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packed", [False, True])
def test_attention_is_the_same_by_both(packed: bool) -> None:
    """torch's FlexAttention, uncompiled, against SDPA."""
    expires, documents = made(200, 20, packed)
    queries, keys, values = torch.randn(2, 4, 200, 16), *torch.randn(2, 2, 2, 200, 16)
    mask = dense_mask(expires, documents).repeat_interleave(2, dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, mask, enable_gqa=True
    )
    got = flex_attention(
        queries, keys, values, block_mask=block_mask(expires, documents, 2), enable_gqa=True
    )
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("shape", "documents"), [((3, 4), None), ((1, 2, 4), torch.ones(4))])
def test_refusals_take_one_line(shape: tuple[int, ...], documents: Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"^block mask: .* must be \[B, [^\n]*$"):
        block_mask(torch.zeros(shape), documents)
