"""R-KV's redundancy, Triton's in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.kernels.redundancy import key_redundancy
from tests.kernels.support_triton import close, generator, on_triton


@pytest.mark.parametrize(
    "length, d, beta, dtype",
    [
        (1, 32, 1, torch.float32),
        (70, 64, 1, torch.bfloat16),
        (65, 80, 2, torch.float32),
        (64, 128, 0, torch.bfloat16),
        (33, 96, 5, torch.float32),
        (40, 256, 1, torch.bfloat16),
        (9, 32, 50, torch.float32),
    ],
)
def test_as_the_reference(length: int, d: int, beta: int, dtype: torch.dtype) -> None:
    g = generator(length)
    few = torch.randn(6, d, generator=g)
    noise = 0.4 * torch.randn(2, 2, length + 1, d, generator=g)
    keys = (few[torch.randint(6, (2, 2, length + 1), generator=g)] + noise).to(dtype)
    keys = keys[:, :, :length]
    at = torch.rand(2, 2, length, generator=g).argsort(-1).to(torch.int32)
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    apart = (unit @ unit.mT - 0.5).abs().min()
    assert apart > 1e-6, "a cosine too close to the threshold: draw other keys"
    expected = key_redundancy(keys, at, beta)
    with on_triton():
        got = key_redundancy(keys, at, beta)
    # Shares of 1: compared relative to an even share.
    close(got * length, expected * length, 2e-6)


def test_what_is_not_a_number_comes_through() -> None:
    keys = torch.randn(1, 2, 40, 32)
    keys[0, 1, 3, 3] = float("nan")
    with on_triton():
        got = key_redundancy(keys, torch.arange(40).expand(1, 2, -1))
    assert got[0, 1].isnan().all() and got[0, 0].isfinite().all()
