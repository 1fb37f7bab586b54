"""Intervals against known values, and what they say where little is known."""

import math

import numpy as np
import pytest

from kvpolicies.eval import stats
from kvpolicies.eval.stats import Interval


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_matches_published_values(successes, total, low, high):
    interval = stats.wilson(successes, total)
    assert interval.value == successes / total
    assert interval.low == pytest.approx(low, abs=1e-4)
    assert interval.high == pytest.approx(high, abs=1e-4)


def test_share_weighs_problems_by_their_denominators():
    assert stats.share([1, 9], [1, 99], seed=0).value == pytest.approx(0.1)


def test_bootstrap_agrees_with_the_normal_interval_of_a_mean():
    draws = np.random.default_rng(0).normal(2.0, 1.0, 400)
    interval = stats.share(list(draws), [1.0] * 400, seed=0)
    half = 1.96 * draws.std(ddof=1) / math.sqrt(400)
    assert interval.low == pytest.approx(draws.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(draws.mean() + half, abs=0.02)


def test_samples_of_one_problem_are_not_taken_as_independent():
    """Ten equal samples of each problem say no more than one sample of each."""
    once = stats.share([1, 0, 1, 1, 0, 1], [1] * 6, seed=0)
    tenfold = stats.share([10, 0, 10, 10, 0, 10], [10] * 6, seed=0)
    assert tenfold == once


def test_paired_difference_sees_what_unpaired_intervals_do_not():
    """One policy loses 4 of 40 problems that the other has, and wins none."""
    full, other = [1] * 30 + [0] * 10, [1] * 26 + [0] * 14
    gap = stats.paired_difference(other, full, [1] * 40)
    assert gap.value == pytest.approx(-0.1)
    assert gap.excludes_zero
    assert stats.wilson(30, 40).overlaps(stats.wilson(26, 40))


def test_no_difference_has_no_width():
    assert stats.paired_difference([1, 0], [1, 0], [1, 1]) == Interval(0.0, 0.0, 0.0)


def test_bootstrap_is_seeded():
    data = ([1, 0, 1, 1, 0], [1] * 5)
    assert stats.share(*data, seed=1) == stats.share(*data, seed=1)


def test_proportion_is_wilson_only_for_one_sample_a_problem():
    assert stats.proportion([1, 0, 1], [1, 1, 1], seed=0) == stats.wilson(2, 3)
    assert stats.proportion([2, 0, 1], [2, 2, 2], seed=0) == stats.share([2, 0, 1], [2] * 3, 0)


def test_one_problem_gives_no_interval():
    interval = stats.share([3], [4], seed=0)
    assert interval.value == 0.75
    assert math.isnan(interval.low) and math.isnan(interval.high)
    assert not interval.excludes_zero


def test_nothing_gives_nan():
    assert math.isnan(stats.wilson(0, 0).value)
    assert math.isnan(stats.share([], [], seed=0).value)
