"""The papers' own rules, the oracle and beacon's options, against examples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import api as ref
from tests.reference.rule import Stream

NEVER = ref.NEVER


def at_degrees(*angles: float) -> np.ndarray:
    """Unit vectors of the plane: [N, 2]."""
    radians = np.deg2rad(angles)
    return np.stack([np.cos(radians), np.sin(radians)], axis=-1)


def flat(tokens: int, prompt: int) -> Stream:
    """All keys and queries zero: every attention row is uniform."""
    q = np.zeros((1, 1, tokens, 2))
    return Stream(np.zeros((1, tokens, 2)), q, q, ref.rotary(2), prompt)


def sizes(outcome: ref.Outcome) -> list[tuple[int, int]]:
    return [(eviction.position, eviction.n_drop) for eviction in outcome.evictions]


def test_h2o_faithful_halves_the_budget():
    terms = [ref.H2O(faithful=True).terms(ref.Budget(n, 0, 0), 9, 9).budget for n in (7, 2, 1)]
    # One slot holds neither half: its window is nothing.
    assert terms == [ref.Budget(7, 0, 3), ref.Budget(2, 0, 1), ref.Budget(1, 0, 0)]
    outcome = ref.simulate(ref.H2O(faithful=True), flat(9, 9), ref.Budget(6, 2, 1))
    # topk = 3: a chunk of one. Uniform attention: 0 and 1 have the most mass, three are new.
    assert outcome.e[0].tolist() == [NEVER, NEVER, 6, 7, 8, *[NEVER] * 4]


def test_rkv_faithful_fills_a_buffer_and_empties_it():
    policy = ref.RKV(faithful=True, every=3, alpha=2)
    # Six slots and three: at 9, 12 in the prompt, at 15, 18 in decode.
    outcome = ref.simulate(policy, flat(19, prompt=14), ref.Budget(6, 2, 1))
    assert sizes(outcome) == [(8, 3), (11, 3), (14, 3), (17, 3)]
    assert outcome.max_slots == 9 and all(len(e.kept[0]) == 6 for e in outcome.evictions)
    # Sinks are not protected; the newest two are.
    shield = ref.protected(policy, policy.terms(ref.Budget(6, 2, 1), 14, 5).budget, *at(9), 3)
    assert np.flatnonzero(shield).tolist() == [7, 8]
    with pytest.raises(ValueError, match="budget"):
        policy.terms(ref.Budget(2, 0, 0), 5, 5)


def at(length: int) -> tuple[np.ndarray, int]:
    return np.arange(length), length - 1


def test_snapkv_faithful_compresses_the_prompt_once():
    policy = ref.SnapKV(faithful=True, observe_window=2)
    outcome = ref.simulate(policy, flat(30, prompt=20), ref.Budget(8, 2, 1))
    assert sizes(outcome) == [(19, 12)]
    kept = outcome.evictions[0].kept[0]
    assert len(kept) == 8 and {18, 19} <= set(kept.tolist()) and outcome.max_slots == 20
    assert len(outcome.final[0]) == 18
    # The prompt that fits stays, and so does all that follows.
    assert not ref.simulate(policy, flat(30, prompt=8), ref.Budget(8, 2, 1)).evictions
    assert policy.terms(ref.Budget(8, 2, 1), 20, 10).budget == ref.Budget(30, 0, 2)
    assert policy.terms(ref.Budget(8, 2, 1), 3, 10).budget == ref.Budget(18, 0, 2)
    with pytest.raises(ValueError, match="budget"):
        policy.terms(ref.Budget(2, 0, 0), 5, 5)


def test_rpc_faithful_grows_by_what_each_period_leaves():
    policy = ref.RPC(faithful=True, P=8, c=4, observe_window=2)
    # Prompt 5, a period of 8 and 2 observing tokens are 15 slots: 6 go, 9 stay. 8 more are 17, and
    # 11 stay.
    outcome = ref.simulate(policy, flat(30, prompt=5), ref.Budget(4, 1, 1))
    assert sizes(outcome) == [(14, 6), (22, 6)]
    assert [len(e.kept[0]) for e in outcome.evictions] == [9, 11]
    assert all(set(range(5)) < set(e.kept[0].tolist()) for e in outcome.evictions)
    terms = policy.terms(ref.Budget(4, 1, 1), 5, 25)
    assert terms.budget == ref.Budget(5 + 4 * 2 + 8 + 2, 5, 2)
    assert [terms.full_at and terms.full_at(seen) for seen in (3, 5, 15, 16, 23, 24)] == [
        *[15] * 3,
        *[17] * 2,
        19,
    ]


def test_oracle_sums_what_a_full_cache_will_give():
    stream, budget = ref.draw(np.random.default_rng(0), tokens=14, prompt=9), ref.Budget(8, 1, 2)
    outcome = ref.simulate(ref.Oracle(), stream, budget)
    first = outcome.evictions[0]
    assert first.position == 7
    for h in range(2):
        masses = np.zeros((2, 8))
        for g in range(2):
            for d in range(8, 14):
                weights = np.exp(stream.k[h, : d + 1] @ stream.q[h, g, d] / np.sqrt(8))
                masses[g] += (weights / weights.sum())[:8]
        assert first.scores[h] == pytest.approx(masses.max(axis=0))
    lse = np.log(np.exp(stream.k[1, :6] @ stream.q[1, 0, 5] / np.sqrt(8)).sum())
    assert ref.log_sum_exps(stream)[1, 0, 5] == pytest.approx(lse)


def test_soft_pool_lies_between_the_mean_and_the_maximum():
    # One key seen by a query of weights 1/4, 3/4 and one of 3/4, 1/4: sqrt((1 + 9) / 2) / 4.
    keys, at_both = np.array([[0.0], [np.log(3)]]), np.array([1])
    queries = np.array([[[1.0]], [[-1.0]]])
    args = (keys, np.arange(2), queries, at_both, "soft")
    assert ref.beacon_scores(*args, 0.5) == pytest.approx([np.sqrt(5) / 4] * 2)
    assert ref.beacon_scores(*args, 1.0) == pytest.approx([1 / 2] * 2)
    assert ref.beacon_scores(*args, 1e-3) == pytest.approx([3 / 4] * 2, rel=1e-3)
    # A key that no query sees has nothing; without a query no key has.
    scores = ref.beacon_scores(keys, np.arange(2), queries, np.array([0]), "soft")
    assert scores.tolist() == [1.0, 0.0]
    nobody = ref.beacon_scores(keys, np.arange(2), queries[:, :0], at_both[:0], "soft")
    assert nobody.tolist() == [0.0, 0.0]


def test_points_average_the_cosines_of_heads():
    # Cosines 0 and 1/2 in two heads: 1/4. Lengths do not matter.
    queries = np.array([at_degrees(0, 90), 7 * at_degrees(10, 70)])
    both = ref.points(queries)
    assert both @ both.T == pytest.approx(np.array([[1, 0.25], [0.25, 1]]))
    assert ref.points(queries[:1]) == pytest.approx(queries[0])


def test_kmeans_by_hand():
    # FPS of three picks 180, 0 and 80 degrees; 100 joins 80, whose centre becomes 90; then the
    # sum of 0 and 20 stands at 10. 80 and 100 are equally near to 90: the smaller index.
    queries = at_degrees(0, 20, 80, 100, 180)
    clusters = ref.kmeans(queries, 3)
    members, nearest = clusters.members, clusters.nearest
    assert sorted(map(sorted, members)) == [[0, 1], [2, 3], [4]]
    order = [next(c for c, m in enumerate(members) if i in m) for i in (0, 4)]
    assert nearest[order[1]] == 4 and nearest[order[0]] in (0, 1)
    # Copies: the second centre has no members, for ties go to the first, and is near to the first.
    clusters = ref.kmeans(np.ones((3, 2)), 2)
    assert (clusters.members, clusters.nearest) == ([[0, 1, 2], []], [0, 0])


def revisit(points: np.ndarray, n_beacon: int = 2, n_recent: int = 1) -> ref.RevisitBuffer:
    return ref.RevisitBuffer(n_beacon, n_recent, points)


def test_a_revisiting_query_takes_the_redundant_beacons_place():
    # Beacons 0 and 30 degrees (cosine .87). 20 is nearer to one than that (.98): stays out. 90
    # has .5: it takes the place of 30. Now the pair has cosine 0: 45 stays out, 225 (-.7) enters.
    held = revisit(at_degrees(0, 30, 20, 90, 45, 225, 1), n_recent=0)
    seen = []
    for position in range(7):
        held.observe(position, 1, position)
        seen.append(list(held.beacons))
    assert seen == [[0], [0, 1], [0, 1], [0, 3], [0, 3], [0, 5], [0, 5]]
    assert held.gap == pytest.approx(np.cos(np.deg2rad(10)) - np.cos(np.deg2rad(30)))


def test_revisiting_does_not_depend_on_how_tokens_come():
    points = ref.points(np.random.default_rng(1).standard_normal((1, 40, 8)))
    one, many = revisit(points, 4, 3), revisit(points, 4, 3)
    for position in range(40):
        one.observe(position, 1, position)
    many.observe(0, 25, 0)
    many.observe(25, 15, 10)
    assert (one.beacons, one.late) == (many.beacons, many.late)
    assert one.late == [37, 38, 39] and one.beacons != [0, 1, 2, 3]


def test_revisit_with_fewer_than_a_pair():
    points = at_degrees(0, 180, 90)
    for n_beacon in (0, 1):
        held = revisit(points, n_beacon, 0)
        held.observe(0, 3, 0)
        assert held.beacons == [0][:n_beacon]


def test_of_equal_pairs_the_first_gives_up_its_later_place():
    # 0, 60, 120: pairs (0, 1) and (1, 2) tie at 1/2, but for rounding: copies tie exactly.
    points = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1], [-1, 0]])
    held = revisit(points, 4, 0)
    held.observe(0, 5, 0)
    assert held.beacons == [0, 4, 2, 3]


def test_whole_history_chooses_anew_from_all_that_is_older():
    held = ref.WholeHistory(2, 3, lambda older, m: older[-m:])
    held.observe(0, 4, 0)
    held.observe(4, 1, 4)
    held.score()
    assert (held.beacons, held.late) == ([0, 1], [2, 3, 4])


def state_of(**options) -> tuple[ref.BeaconState, Stream]:
    stream = ref.draw(np.random.default_rng(5), group=2, tokens=20, prompt=20)
    policy = ref.Beacon(n_beacon=3, n_recent=2, **options)
    state = policy.start(stream, ref.Budget(20, 1, 2))
    state.observe(ref.Observation([np.arange(20)] * 2, 0, 20))
    for buffers in state.buffers:
        for buffer in buffers:
            buffer.score()
    return state, stream


def test_shared_heads_choose_the_same_time_steps_but_keep_their_own_queries():
    state, stream = state_of(shared=True)
    assert [len(buffers) for buffers in state.buffers] == [1, 1]
    chosen = state.buffers[1][0].beacons
    assert chosen == ref.fps(ref.points(stream.qpre[1][:, :18]), 3)
    queries, sees = state._observing(1, 0, 19)
    assert sees.tolist() == [19] * 3 + [18, 19]
    for g in range(2):
        assert queries[g][:3] == pytest.approx(stream.rope(stream.qpre[1, g, chosen], 19))
        assert queries[g][3:] == pytest.approx(stream.q[1, g, 18:])


@pytest.mark.parametrize("space", ["pre_rope", "post_rope"])
def test_centroids_are_means_of_raw_queries(space):
    state, stream = state_of(selector="kmeans_centroid", space=space)
    vectors = (stream.qpre if space == "pre_rope" else stream.q)[0, 1]
    clusters = ref.kmeans(vectors[:18], 3)
    means = np.array([vectors[inside].mean(axis=0) for inside in clusters.members])
    expected = stream.rope(means, 19) if space == "pre_rope" else means
    assert state._observing(0, 1, 19)[0][0][:3] == pytest.approx(expected)
    nearest = state_of(selector="kmeans_nearest", space=space)[0]
    assert nearest._merged(0, 1) == [[i] for i in clusters.nearest]


def test_few_queries_are_all_beacons():
    for selector in ("kmeans_centroid", "kmeans_nearest", "naive_fps"):
        policy = ref.Beacon(n_beacon=30, n_recent=2, selector=selector)
        stream = ref.draw(np.random.default_rng(5), tokens=20, prompt=20)
        state = policy.start(stream, ref.Budget(20, 1, 2))
        state.observe(ref.Observation([np.arange(20)] * 2, 0, 20))
        scores = state.scores([np.arange(20)] * 2, 19)
        assert state._merged(0, 0) == [[t] for t in range(18)] and len(scores[0]) == 20
