"""Intervals against known values, and what they say where little is known."""

import math

import numpy as np
import pytest

from kvpolicies.eval.stats import intervals as stats
from kvpolicies.eval.stats.intervals import Interval


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
    assert stats.proportion([1, 0, 1], [1, 1, 1]) == stats.wilson(2, 3)
    assert stats.proportion([2, 0, 1], [2, 2, 2]) == stats.clustered([2, 0, 1], [2] * 3, 6)


def test_one_problem_gives_no_interval():
    interval = stats.share([3], [4], seed=0)
    assert interval.value == 0.75
    assert math.isnan(interval.low) and math.isnan(interval.high)
    assert not interval.excludes_zero


def test_nothing_gives_nan():
    assert math.isnan(stats.wilson(0, 0).value)
    assert math.isnan(stats.share([], [], seed=0).value)


@pytest.mark.parametrize("beta", [(1, 1), (8, 0.5)])  # all kinds of problems; nearly all solved
def test_intervals_cover_the_truth(beta):
    """30 problems, each with its own chance, 4 samples of each under two equal policies."""
    rng, count, true = np.random.default_rng(0), 800, beta[0] / sum(beta)
    hits = {"share": 0, "pass": 0, "gap": 0}
    # The chance that at least one of 4 samples is right, over the same problems.
    four = 1 - np.prod([(beta[1] + i) / (sum(beta) + i) for i in range(4)])
    for _ in range(count):
        chance = rng.beta(beta[0], beta[1], 30)
        one, two = rng.binomial(8, chance), rng.binomial(8, chance)
        sizes = [8.0] * 30
        shares = stats.proportion(list(one), sizes)
        passed = stats.pass_at(4, list(one), sizes)
        gap = stats.paired_difference(list(one), list(two), sizes)
        hits["share"] += shares.low <= true <= shares.high
        hits["pass"] += passed.low <= four <= passed.high
        hits["gap"] += gap.low <= 0 <= gap.high
    # A binomial of 800 at 0.95 has a standard deviation of 0.8 %.
    assert all(0.925 <= hit / count <= 0.985 for hit in hits.values()), hits


def test_an_interval_that_takes_samples_as_independent_would_not_cover():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(500):
        right = rng.binomial(8, rng.beta(1, 1, 30)).sum()
        naive = stats.wilson(right, 240)
        hits += naive.low <= 0.5 <= naive.high
    assert hits / 500 < 0.8


def test_p_values_are_uniform_where_policies_are_alike():
    """Never too small at any level; close to uniform where gaps are many."""
    rng, found = np.random.default_rng(2), []
    for _ in range(1000):
        chance = rng.beta(1, 1, 40)
        gaps = rng.binomial(64, chance) - rng.binomial(64, chance)
        found.append(stats.sign_flip(list(gaps), seed=0))
    for level in (0.01, 0.05, 0.2, 0.5, 0.8):
        share = np.mean(np.array(found) <= level)
        chance = 3 * math.sqrt(level * (1 - level) / 1000)
        assert level - chance - 0.02 <= share <= level + chance  # ties make p-values larger


def test_the_exact_test_is_the_enumeration_of_all_signs():
    import itertools

    gaps = [3, -1, 2, 0, 1, -2, 4]
    sums = [
        abs(sum(s * g for s, g in zip(signs, gaps, strict=True)))
        for signs in itertools.product((1, -1), repeat=7)
    ]
    exact = np.mean(np.array(sums) >= abs(sum(gaps)))
    assert stats.sign_flip(gaps, seed=0) == pytest.approx(exact)
    # Gaps that are no whole numbers go through scipy: all patterns too.
    assert stats.sign_flip([g * 0.1 for g in gaps], seed=0) == pytest.approx(exact)


def test_sign_flips_of_many_fractions_are_drawn_and_seeded():
    gaps = list(np.random.default_rng(3).normal(0.3, 1, 40))
    p = stats.sign_flip(gaps, seed=0)
    assert p == stats.sign_flip(gaps, seed=0)
    from scipy.stats import ttest_1samp

    assert p == pytest.approx(ttest_1samp(gaps, 0)[1], abs=0.03)
    assert stats.sign_flip([100.5] * 40, seed=0) == pytest.approx(1e-4)  # never nothing


def test_no_gap_no_evidence():
    assert stats.sign_flip([0, 0, 0], seed=0) == 1.0
    assert math.isnan(stats.sign_flip([], seed=0))
    assert stats.sign_flip([5], seed=0) == 1.0


def test_holm_matches_a_worked_example_and_leaves_nan_out():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    found = stats.holm([0.01, math.nan, 0.9])
    assert found[0] == pytest.approx(0.02) and math.isnan(found[1])
    assert found[2] == pytest.approx(0.9)
    assert stats.holm([]) == []


def test_holm_keeps_the_family_wise_error():
    """6 pairs among 4 equal policies on the same problems: any false call in at most 5 %."""
    rng, wrong, uncorrected = np.random.default_rng(4), 0, 0
    for _ in range(400):
        right = rng.binomial(4, rng.beta(1, 1, 30), size=(4, 30))
        p = [stats.sign_flip(list(right[i] - right[j]), seed=0) for i in range(4) for j in range(i)]
        wrong += min(stats.holm(p)) < 0.05
        uncorrected += min(p) < 0.05
    assert wrong / 400 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)
    assert uncorrected / 400 > 0.1


def test_pass_at_k_is_unbiased_and_the_simple_formula_is_not():
    """Expectations over all outcomes of 5 samples, each right with chance 0.3."""
    chance, counts = 0.3, range(6)
    weights = [math.comb(5, c) * chance**c * (1 - chance) ** (5 - c) for c in counts]
    truth = 1 - (1 - chance) ** 4
    made = [stats.pass_at(4, [c], [5]).value for c in counts]
    assert np.dot(weights, made) == pytest.approx(truth)
    simple = [1 - (1 - c / 5) ** 4 for c in counts]
    assert abs(np.dot(weights, simple) - truth) > 0.03
    assert stats.pass_at(1, [1, 2, 4], [4] * 3).value == pytest.approx(7 / 12)
    assert stats.pass_at(4, [0, 1, 4], [4] * 3).value == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="at least 3"):
        stats.pass_at(3, [1, 1], [3, 2])


def test_all_right_is_no_certainty():
    """16 samples of each of 10 problems, all right: no more is known than from 10 trials."""
    found = stats.proportion([16] * 10, [16] * 10)
    assert found.value == 1 and found.high == 1
    assert found.low <= stats.wilson(10, 10).low


def test_no_difference_of_shares_is_said_to_lie_beyond_100_points():
    right = [1.0] + [0.0] * 15
    full = [1.0] * 16
    free = stats.paired_difference(right, full, full)
    assert free.low < -1 < free.value
    held = stats.paired_difference(right, full, full, most=1.0)
    assert held == (free.value, -1.0, free.high)
    back = stats.paired_difference(full, right, full, most=1.0)
    assert back == (-free.value, -free.high, 1.0)
