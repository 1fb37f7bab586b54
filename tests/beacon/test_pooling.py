"""The soft pool lies between the mean and the maximum."""

import pytest
import torch

from kvpolicies.beacon.pooling import soft

WEIGHTS = torch.rand(2, 3, 2, 5, 7, generator=torch.Generator().manual_seed(0))
LOOKING = torch.tensor([10, 10])[:, None, None]


LARGEST, MEAN = WEIGHTS.amax(dim=(2, 3)), WEIGHTS.mean(dim=(2, 3))


def pooled(temperature: float = 0.25, weights: torch.Tensor = WEIGHTS) -> torch.Tensor:
    return soft(weights, LOOKING, temperature)


def test_soft_at_temperature_one_is_the_mean() -> None:
    assert torch.allclose(pooled(1.0), MEAN, rtol=1e-6)


def test_soft_comes_to_the_maximum_as_the_temperature_falls() -> None:
    gaps = [float((LARGEST - pooled(t)).max()) for t in (1.0, 0.3, 0.1, 0.01, 1e-4)]
    assert gaps == sorted(gaps, reverse=True) and 0 <= gaps[-1] < 1e-3
    assert torch.allclose(pooled(1e-30), LARGEST, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.1, 0.25, 0.7])
def test_soft_is_its_formula(temperature: float) -> None:
    double = WEIGHTS.double()
    expected = (double ** (1 / temperature)).mean(dim=(2, 3)) ** temperature
    assert torch.allclose(pooled(temperature).double(), expected, rtol=1e-5)


def test_small_weights_to_a_large_power_keep_their_order() -> None:
    small = WEIGHTS * 1e-6
    ours = pooled(0.05, small)
    assert (ours > 0).all()
    assert torch.allclose(ours, pooled(0.05) * 1e-6, rtol=1e-4)


def test_nobody_looks_nothing_is_scored() -> None:
    assert pooled(weights=torch.zeros_like(WEIGHTS)).abs().max() == 0


def test_queries_that_are_not_there_do_not_thin_the_soft_mean() -> None:
    padded = torch.cat([WEIGHTS, torch.zeros_like(WEIGHTS)], dim=3)
    assert torch.allclose(pooled(weights=padded), pooled(), rtol=1e-6)


def test_nan_reaches_the_caller() -> None:
    bad = WEIGHTS.clone()
    bad[0, 0, 0, 0, 0] = float("nan")
    assert pooled(weights=bad).isnan().any()
