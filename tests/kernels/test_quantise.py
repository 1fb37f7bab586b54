"""Codes of keys and values against numpy, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpolicies.kernels.quantise import TOP, Codes, dequantise, layout, quantise

SCALED = tuple(TOP)


def e4m3() -> np.ndarray:
    """All finite numbers of fp8 e4m3, ascending, built from its definition."""
    found = {0.0}
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):  # NaN
                value = (mantissa / 8) * 2.0**-6 if exponent == 0 else (
                    (1 + mantissa / 8) * 2.0 ** (exponent - 7)
                )  # fmt: skip
                found |= {value, -value}
    return np.array(sorted(found))


def reference(x: np.ndarray, kind: str) -> np.ndarray:
    """What is read back of x [N, D] float32, vector by vector."""
    top, out = TOP[kind], np.zeros_like(x)
    grid = e4m3() if kind == "fp8" else np.arange(-top, top + 1)
    for i, vector in enumerate(x):
        most = np.abs(vector).max()
        if most == 0:
            continue
        scale = np.float32(np.float16(max(np.float32(most) / np.float32(top), 2.0**-24)))
        for j, number in enumerate(vector):
            scaled = np.clip(np.float32(number) / scale, -top, top)
            gaps = np.abs(grid.astype(np.float64) - np.float64(scaled))
            nearest = np.flatnonzero(gaps == gaps.min())
            # Of two equally near, the even one: of a grid without gaps, every other number.
            half = len(grid) // 2
            code = next((n for n in nearest if (n - half) % 2 == 0), nearest[0])
            out[i, j] = np.float32(grid[code]) * scale
    return out


def vectors() -> np.ndarray:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((60, 16)).astype(np.float32)
    x *= 10.0 ** rng.integers(-6, 4, (60, 1))
    x[3] = 0
    x[4] = [0.5, 1.5, 2.5, -0.5, -1.5, 3.5, 7, -7, 127, 12.5, 63.5, -64.5, 0, 1, 448, 100]  # ties
    x[5, 1:] = 0
    x[6] = 1e-9  # below what float16 scales
    return x.astype(np.float32)


@pytest.mark.parametrize("kind", SCALED)
def test_what_is_read_back_is_numpys(kind: str) -> None:
    x = vectors()
    stored = quantise(torch.from_numpy(x), kind)
    assert stored.scales is not None and stored.scales.dtype == torch.float16
    assert (stored.codes.shape[-1], stored.codes.dtype) == layout(kind, x.shape[-1])
    np.testing.assert_array_equal(dequantise(stored, kind).numpy(), reference(x, kind))


@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 254), ("int4", 1 / 14), ("fp8", 1 / 16)])
def test_no_number_is_further_off_than_half_a_step(kind: str, step: float) -> None:
    x = torch.from_numpy(vectors()[7:])
    back = dequantise(quantise(x, kind), kind)
    # A scale in float16 is off by 2 ** -11 of itself at most, where it is no subnormal.
    bound = (step + 2**-10) * x.abs().amax(-1, keepdim=True)
    assert ((back - x).abs() <= bound + 2**-24 * TOP[kind]).all()


def test_bf16_is_a_cast() -> None:
    x = torch.from_numpy(vectors())
    stored = quantise(x, "bf16")
    assert stored.scales is None and torch.equal(stored.codes, x.bfloat16())
    assert torch.equal(dequantise(stored, "bf16"), x.bfloat16().float())


@pytest.mark.parametrize("kind", SCALED)
def test_codes_are_read_wherever_they_lie(kind: str) -> None:
    x = torch.from_numpy(vectors()).view(3, 4, 5, 16)
    stored, order = quantise(x, kind), torch.tensor([4, 0, 3, 1, 2])
    assert stored.scales is not None
    moved = Codes(stored.codes[:, :, order], stored.scales[:, :, order])
    assert torch.equal(dequantise(moved, kind), dequantise(stored, kind)[:, :, order])


def test_an_odd_head_size_has_no_int4() -> None:
    with pytest.raises(ValueError, match="the head size 7 is odd"):
        layout("int4", 7)


@pytest.mark.parametrize("kind", SCALED)
def test_what_is_no_number_is_none_when_read_back(kind: str) -> None:
    x = torch.ones(2, 8)
    x[0, 3] = float("nan")
    back = dequantise(quantise(x, kind), kind)
    assert back[0].isnan().any() and torch.allclose(back[1], x[1], rtol=0.01)
