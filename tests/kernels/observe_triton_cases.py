"""Observation scores, Triton's in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.observe import observation_scores
from tests.kernels.support_triton import close, generator, on_triton

bf16, f32 = torch.bfloat16, torch.float32

# B, H, G, N, L, D, queries, keys, cap, sink, per, pool
SHAPES = [
    (1, 1, 1, 1, 1, 32, f32, f32, None, False, "group", "max"),
    (2, 2, 3, 5, 70, 64, f32, f32, None, False, "group", "max"),
    (1, 2, 5, 4, 33, 80, bf16, bf16, 2.0, True, "head", "sum"),
    (1, 1, 8, 20, 70, 96, f32, bf16, None, True, "group", "mean"),
    (2, 1, 4, 8, 64, 128, f32, f32, 2.0, True, "merged", "mean"),
    (1, 1, 7, 3, 65, 256, bf16, bf16, None, False, "group", "sum"),
    (1, 1, 6, 3, 40, 64, bf16, f32, None, False, "merged", "max"),
    (1, 1, 2, 40, 66, 32, f32, f32, None, True, "head", "max"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_scores(shape: tuple) -> None:
    b, h, g, n, length, d, query_type, key_type, cap, sink, per, pool = shape
    seed = generator(length)
    queries = torch.randn(b, h, g, n, d, generator=seed).to(query_type)
    keys = torch.randn(b, h, length + 3, d, generator=seed).to(key_type)[:, :, :length]
    at = torch.rand(b, h, length, generator=seed).argsort(-1).to(torch.int32)
    when = torch.randint(length // 2, length + 1, (b, n), generator=seed)
    valid = torch.rand(b, n, generator=seed) > 0.3
    softmax = LogitTransform(2 * d**-0.5, cap, torch.randn(h, g, generator=seed) if sink else None)
    for exists in (valid, None):
        args = (queries, keys, when, at, softmax, exists, pool, per)
        expected = observation_scores(*args)
        with on_triton():
            got = observation_scores(*args)
        # Where float32 meets 16 bits, it is taken at a mantissa of 16 bits.
        close(got, expected, 2e-6 if query_type == key_type else 2e-5)


def test_the_same_whatever_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows side by side, more slots than one program takes, one part or several."""
    seed = generator(0)
    queries, keys = torch.randn(2, 1, 2, 3, 32, generator=seed), torch.randn(2, 1, 150, 32)
    args = (queries, keys, torch.full((2, 3), 99), torch.arange(150).expand(2, 1, -1), 0.2)
    with on_triton():
        many = observation_scores(*args)
        monkeypatch.setattr("kvpolicies.kernels.observe.MOST_SPLITS", 1)
        close(observation_scores(*args), many, 1e-6)
    assert many[:, :, 100:].abs().max() == 0


@pytest.mark.parametrize("sink", [None, torch.ones(1, 2)])
def test_who_sees_nothing_scores_zero(sink: torch.Tensor | None) -> None:
    queries, keys, at = torch.ones(1, 1, 2, 3, 32), torch.ones(1, 1, 5, 32), torch.arange(5)
    softmax = LogitTransform(1.0, None, sink)
    for when, valid in ((-1, True), (9, False)):
        exists = torch.full((1, 3), valid)
        with on_triton():
            scores = observation_scores(
                queries, keys, torch.full((1, 3), when), at.expand(1, 1, 5), softmax, exists
            )
        assert scores.abs().max() == 0


@pytest.mark.parametrize("pool", ["max", "sum"])
@pytest.mark.parametrize("per", ["group", "merged"])
def test_what_is_not_a_number_comes_through(pool: str, per: str) -> None:
    queries, keys = torch.ones(1, 2, 2, 3, 32), torch.ones(1, 2, 5, 32)
    keys[0, 1, 2, 7] = float("nan")
    at, when = torch.arange(5).expand(1, 2, 5), torch.tensor([[1, 4, 4]])
    args = (queries, keys, when, at, 0.1, None, pool, per)
    with on_triton():
        scores = observation_scores(*args)
    assert torch.equal(scores.isnan(), observation_scores(*args).isnan())
    assert scores[0, 1].isnan().all() and not scores[0, 0].isnan().any()
