"""The references' scores against examples worked out by hand.

Head size 1 makes the scale 1, so that a key ln 3 and a query 1 give a weight of 3.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import api as ref

LN2, LN3, LN9 = np.log(2.0), np.log(3.0), np.log(9.0)


def column(*values: float) -> np.ndarray:
    """Keys or queries of head size 1: [N, 1]."""
    return np.array(values, dtype=float)[:, None]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + np.exp(-x))


def test_rotary_pairs_the_halves():
    # D = 4: pairs (0, 2) at frequency 1 and (1, 3) at 10000^(-1/2) = 0.01.
    rope = ref.rotary(4)
    assert rope(np.array([1.0, 0, 0, 0]), 3) == pytest.approx([np.cos(3), 0, np.sin(3), 0])
    assert rope(np.array([0, 1.0, 0, 0]), 3) == pytest.approx([0, np.cos(0.03), 0, np.sin(0.03)])
    assert rope(np.array([0, 0, 1.0, 0]), 3) == pytest.approx([-np.sin(3), 0, np.cos(3), 0])


def test_rotated_products_depend_on_the_distance_alone():
    rng, rope = np.random.default_rng(0), ref.rotary(8, 500.0)
    q, k = rng.standard_normal((2, 8))
    assert rope(q, 9) @ rope(k, 4) == pytest.approx(rope(q, 105) @ rope(k, 100))


def test_softmax_ignores_what_is_not_seen():
    # Weights 1 : 3 over the two seen slots; nothing seen gives zeros, not NaN.
    row = ref.softmax(np.array([0.0, 50.0, LN3]), np.array([True, False, True]))
    assert row == pytest.approx([0.25, 0.0, 0.75])
    assert ref.softmax(np.ones(2), np.zeros(2, dtype=bool)).tolist() == [0.0, 0.0]


def test_logits_are_scaled_by_the_root_of_the_head_size():
    # (1+1+1+1) / sqrt(4) = 2.
    assert ref.logits(np.ones(4), np.ones((1, 4))) == pytest.approx([2.0])


def test_average_pool_divides_by_the_kernel_at_the_edges():
    # Slot 0 has two zeros outside: (5+0+0)/5 = 1; the middle (5+10)/5 = 3; the end 10/5 = 2.
    values = np.array([5.0, 0, 0, 0, 10])
    expected = np.array([1.0, 1, 3, 2, 2])
    assert ref.average_pool(values, np.arange(5), 5) == pytest.approx(expected)
    # Position order, not slot order, and gaps between positions do not count.
    shuffle = np.array([3, 0, 4, 2, 1])
    positions = np.array([0, 2, 7, 50, 51])
    pooled = ref.average_pool(values[shuffle], positions[shuffle], 5)
    assert pooled == pytest.approx(expected[shuffle])


def test_max_pool_ignores_the_outside():
    # With zeros outside, the edges would be 0.
    pooled = ref.max_pool(np.array([-1.0, -2, -3]), np.arange(3), 3)
    assert pooled.tolist() == [-1.0, -1.0, -2.0]


def test_tova_is_the_mean_over_the_layer():
    # Head 0: weights 1:3 -> 1/4, 3/4. Head 1: equal keys -> 1/2, 1/2. Mean 3/8, 5/8.
    keys = np.array([column(0, LN3), column(2, 2)])
    assert ref.tova_scores(keys, np.ones((2, 1, 1))) == pytest.approx([3 / 8, 5 / 8])


def test_snapkv_is_causal_pooled_and_then_the_group_maximum():
    # Queries at 3 and 4. Head 0 (query 0): quarters over 0..3, then fifths: 9/20 x3 before them.
    # Head 1 (query 1, keys ln 4 and ln 9): 4:1:1:1 of 7, then 4:1:1:1:9 of 16: 23/28, 23/112 x2.
    # Pool 3 of these three, zeros outside: .3 .45 .3 and 115/336 138/336 46/336.
    keys, queries = column(np.log(4), 0, 0, 0, LN9), np.array([column(0, 0), column(1, 1)])
    taus, positions = np.array([3, 4]), np.arange(5)
    scores = ref.snapkv_scores(keys, positions, queries, taus, kernel=3)
    assert scores == pytest.approx([115 / 336, 0.45, 0.3, np.inf, np.inf])
    order = np.array([2, 0, 4, 3, 1])
    shuffled = ref.snapkv_scores(keys[order], positions[order], queries, taus, kernel=3)
    assert shuffled == pytest.approx(scores[order])


def test_rpc_scores_only_what_is_older_than_all_its_queries():
    # Queries at 3 and 4, so 0..2 are older. Query head 0: 1/3 x3, twice: 2/3 x3.
    # Query head 1 (weights 1:1:2): 1/4 1/4 1/2, twice: 1/2 1/2 1. Mean in 12ths: 7 7 10.
    # Pool 3 in 36ths: 7+7, 7+7+10, 7+10.
    keys = column(0, 0, LN2, 70, -70)
    queries = np.array([column(0, 0), column(1, 1)])
    expected = [14, 24, 17]
    one = ref.rpc_scores(keys[None], np.arange(5), queries[None], np.array([3, 4]), kernel=3)
    assert one[:3] * 36 == pytest.approx(expected)
    assert np.isposinf(one[3:]).all()
    # The same as two KV heads of one query head each: the mean goes over the whole layer.
    two = ref.rpc_scores(
        np.array([keys, keys]), np.arange(5), queries[:, None], np.array([3, 4]), kernel=3
    )
    assert two[:3] * 36 == pytest.approx(expected)


def test_rpc_leaves_out_what_is_not_up_for_eviction():
    # Five tokens, two of them not to go: softmax and pool see 2..4 alone, as above; 0, 1 stay.
    keys, queries = column(90, -90, 0, 0, LN2, 70, -70), np.array([column(0, 0), column(1, 1)])
    taus = np.array([5, 6])
    scores = ref.rpc_scores(keys[None], np.arange(7), queries[None], taus, kernel=3, first=2)
    assert scores[2:5] * 36 == pytest.approx([14, 24, 17])
    assert np.isposinf(scores[[0, 1, 5, 6]]).all()


def test_rpc_with_nothing_older_protects_everything_alike():
    scores = ref.rpc_scores(np.ones((1, 3, 1)), np.arange(3), np.ones((1, 1, 3, 1)), np.arange(3))
    assert np.isposinf(scores).all()


def test_rkv_importance_takes_the_group_maximum_of_logits():
    # Logits over the older keys (1, -1): ln 2, -ln 2 and 0, 0. Maximum ln 2, 0: weights 2:1.
    # (The maximum of the two softmaxes would be 4/5 and 1/2.)
    keys, queries = column(1, -1, 5), np.array([column(LN2), column(0)])
    args = (keys, np.arange(3), queries, np.array([2]))
    assert ref.rkv_importance(*args, kernel=1) == pytest.approx([2 / 3, 1 / 3, 0])
    assert ref.rkv_importance(*args, kernel=7) == pytest.approx([2 / 3, 2 / 3, 0])


def test_rkv_importance_is_the_mean_over_the_queries():
    # Queries at 2 and 3: weights 3:1 and 1:1 over the older two. Mean 5/8, 3/8.
    keys, queries = column(LN3, 0, 9, 9), np.array([column(1, 0)])
    importance = ref.rkv_importance(keys, np.arange(4), queries, np.array([2, 3]), kernel=1)
    assert importance == pytest.approx([5 / 8, 3 / 8, 0, 0])


def test_rkv_importance_without_older_keys_is_zero():
    importance = ref.rkv_importance(column(1, 2), np.arange(2), column(1, 1)[None], np.arange(2))
    assert importance.tolist() == [0.0, 0.0]


def test_rkv_redundancy_spares_the_newest_copies():
    # Three copies and an orthogonal key. beta = 1 zeroes the newest copy in each row:
    # row 0: [0 1 .], row 1: [1 0 .], row 2: [1 . 0]. Column means 2/4, 1/4, 0, 0.
    keys = np.array([[1.0, 0], [2, 0], [3, 0], [0, 1]])
    expected = np.exp([0.5, 0.25, 0, 0]) / np.exp([0.5, 0.25, 0, 0]).sum()
    assert ref.rkv_redundancy(keys, np.arange(4)) == pytest.approx(expected)
    order = np.array([2, 3, 0, 1])
    assert ref.rkv_redundancy(keys[order], order) == pytest.approx(expected[order])
    # beta = 2 zeroes both neighbours in each row; beta = 0 none: means 2/4, 2/4, 2/4, 0.
    assert ref.rkv_redundancy(keys, np.arange(4), beta=2) == pytest.approx([0.25] * 4)
    none = ref.rkv_redundancy(keys, np.arange(4), beta=0)
    assert none / none[3] == pytest.approx(np.exp([0.5, 0.5, 0.5, 0]))


def test_rkv_zeroes_only_above_the_threshold():
    # Cosines of the middle key to the others are exactly 1/2: not above. Means .5/3, 1/3, .5/3.
    keys = np.array([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
    redundancy = ref.rkv_redundancy(keys, np.arange(3))
    assert redundancy / redundancy[0] == pytest.approx([1, np.exp(0.5 / 3), 1])
    assert ref.rkv_threshold_gap(keys) == 0.0


def test_rkv_weighs_importance_against_redundancy():
    # Two orthogonal older keys, weights 3:1 (kernel 1), and no redundancy: R = 1/3 each.
    keys = np.array([[np.sqrt(2) * LN3, 0, 0], [0, 1, 0], [0, 0, 1]])
    queries = np.array([[[np.sqrt(1.5), 0, 0]]])
    scores = ref.rkv_scores(keys, np.arange(3), queries, np.array([2]), lam=0.1, kernel=1)
    assert scores == pytest.approx([0.1 * 0.75 - 0.3, 0.1 * 0.25 - 0.3, -0.3])


def test_keydiff_measures_the_angle_to_the_mean_direction():
    # Unit keys (1,0), (0,1), (-1,0): mean (0, 1/3). The lengths do not matter.
    scores = ref.keydiff_scores(np.array([[7.0, 0], [0, 2], [-1, 0]]))
    assert scores == pytest.approx([0, -1, 0])


def test_lazy_keeps_the_longest_gap():
    # From 0 on; seen at 3 (gap 3), at 4 (gap 1: alpha itself counts), missed at 5.
    token = np.array([0]), np.array([0])
    for step, attention in [(1, 0.0), (3, 0.2), (4, 0.1), (5, 0.09)]:
        token = ref.lazy_update(np.array([attention]), step, *token, alpha=0.1)
    assert token == (4, 3)
    # At 10: 2 sigma(-1 - 6/3) and 2 sigma(1 - 3); a token that never recurred has neither. The
    # second falls with the gap: of tokens just seen, the one that was never away long stays.
    scores = ref.lazy_scores(10, np.array([4, 9]), np.array([3, 0]))
    assert scores == pytest.approx([2 * sigmoid(-3) + 2 * sigmoid(-2), 0.0], abs=1e-5)
    often, seldom = ref.lazy_scores(10, np.array([10, 10]), np.array([1, 8]))
    assert often == pytest.approx(2 * sigmoid(-1) + 1) and seldom < 0.6
    assert np.isfinite(ref.lazy_scores(100_000, np.array([0]), np.array([1]))).all()
