"""The beacon reference against examples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import api as ref


def at_degrees(*angles: float) -> np.ndarray:
    """Unit vectors of the plane: [N, 2]."""
    radians = np.deg2rad(angles)
    return np.stack([np.cos(radians), np.sin(radians)], axis=-1)


def test_fps_on_four_unit_vectors():
    # The sum of 0, 30, 90, 200 degrees is (.926, 1.158); the products are .926, 1.381, 1.158,
    # -1.266: 200 comes first. Cosines to it: -.940, -.985, -.342: 30 is farthest. Highest
    # cosine to {200, 30}: 0 has .866, 90 has .5: 90.
    queries = at_degrees(0, 30, 90, 200)
    assert ref.fps(queries, 3) == [3, 1, 2]
    assert ref.fps(queries * np.array([[9.0], [1], [0.1], [4]]), 3) == [3, 1, 2]
    assert ref.fps(queries, 4) == [0, 1, 2, 3]
    assert ref.fps(queries, 0) == []
    # The closest decision: -.940 against -.985.
    gap = ref.fps_with_gap(queries, 2)[1]
    assert gap == pytest.approx(np.cos(np.deg2rad(200)) - np.cos(np.deg2rad(170)))


def test_fps_ties_take_the_smaller_index():
    # x, y, -x, -y: the sum is 0, so x; then -x (cosine -1); y and -y tie at 0.
    axes = np.array([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    assert ref.fps(axes, 3) == [0, 2, 1]
    # Copies: a chosen one is not chosen again. Zero queries have cosine 0 to all.
    assert ref.fps(np.ones((3, 2)), 2) == [0, 1]
    assert ref.fps(np.zeros((3, 2)), 2) == [0, 1]
    assert ref.fps_with_gap(np.ones((3, 2)), 2)[1] == np.inf


def test_scores_pool_over_the_queries_and_the_group():
    # Keys 0, ln 3: query 1 gives 1/4, 3/4; a query that sees only position 0 gives 1, 0.
    keys, positions = np.array([[0.0], [np.log(3)]]), np.arange(2)
    queries, sees = np.array([[[1.0], [5.0]]]), np.array([1, 0])
    assert ref.beacon_scores(keys, positions, queries, sees) == pytest.approx([1, 3 / 4])
    mean = ref.beacon_scores(keys, positions, queries, sees, pool="mean")
    assert mean == pytest.approx([5 / 8, 3 / 8])
    # The same two queries as two heads of the group.
    group = ref.beacon_scores(keys, positions, queries.reshape(2, 1, 1), np.array([1]))
    heavy = 3.0**5 / (1 + 3.0**5)
    assert group == pytest.approx([1 / 4, heavy])


class Newest:
    """Stands for FPS: keeps the newest m, and remembers what it was asked."""

    def __init__(self):
        self.asked: list[list[int]] = []

    def __call__(self, held: list[int], m: int) -> list[int]:
        self.asked.append(list(held))
        return held[len(held) - m :]


def buffer(n_beacon: int = 2, n_recent: int = 2, total: int = 8) -> ref.QueryBuffer:
    return ref.QueryBuffer(n_beacon, n_recent, total - n_recent, Newest())


def test_buffer_in_decode():
    # Eight slots, queries late from the seventh on. Full (four) at 3 and at 5.
    held, seen = buffer(), []
    for position in range(8):
        held.observe(position, 1, position)
        seen.append((list(held.beacons), list(held.late), held.is_late))
    assert seen == [
        ([0], [], False),
        ([0, 1], [], False),
        ([0, 1, 2], [], False),
        ([2, 3], [], False),
        ([2, 3, 4], [], False),
        ([4, 5], [], True),
        ([4, 5], [6], True),
        ([4, 5], [6, 7], True),
    ]
    # Down to seven slots: at the next eviction 7 is still among the two newest, 6 is not.
    held.evicted(7)
    assert (held.beacons, held.late, held.is_late) == ([5, 6], [7], True)
    held.observe(8, 1, 7)
    assert (held.beacons, held.late) == ([5, 6], [7, 8])
    # Down to five: the next query is early again, and reaches six slots: late at once.
    held.evicted(5)
    assert (held.beacons, held.is_late) == ([7, 8], False)
    held.observe(9, 1, 5)
    assert (held.beacons, held.late, held.is_late) == ([8, 9], [], True)
    # Down to exactly six: late at once, too, and all late ones have left by the next time.
    held.evicted(6)
    assert held.is_late and held.late == []


def test_buffer_reaching_the_late_phase_shrinks_before_it_is_full():
    # Five early queries: 0..3 shrink to 2 3, then 4; total - n_recent = 5 is reached with three.
    held = buffer(total=7)
    for position in range(5):
        held.observe(position, 1, position)
    assert (held.beacons, held.is_late) == ([3, 4], True)


def test_buffer_in_prefill():
    # One event of eight: six early ones are selected from at once, two are late.
    held = buffer()
    held.observe(0, 8, 0)
    assert (held.beacons, held.late, held.is_late) == ([4, 5], [6, 7], True)
    assert isinstance(held.select, Newest) and held.select.asked == [[0, 1, 2, 3, 4, 5]]
    # A prompt of three is cut to two although the buffer could hold four; one of two is not.
    for n, beacons in [(3, [1, 2]), (2, [0, 1])]:
        held = buffer()
        held.observe(0, n, 0)
        assert (held.beacons, held.is_late) == (beacons, False)


def test_buffer_after_a_prefill_eviction():
    # 0..7 came; three go (five slots stay); three come: one early, two late.
    held = buffer()
    held.observe(0, 8, 0)
    held.evicted(5)
    assert held.beacons == [6, 7]
    held.observe(8, 3, 5)
    assert (held.beacons, held.late) == ([7, 8], [9, 10])


def test_more_late_queries_than_fit_are_merged():
    held = ref.QueryBuffer(2, 2, 0, Newest())
    held.observe(0, 5, 0)
    assert (held.beacons, held.late) == ([1, 2], [3, 4])


def test_splits_at_their_ends():
    # (0, 4): recents alone. (4, 0): beacons alone, and the buffer stays bounded in decode.
    recents, beacons = buffer(0, 4), buffer(4, 0)
    for position in range(8):
        recents.observe(position, 1, position)
        beacons.observe(position, 1, position)
        assert len(beacons.beacons) <= 4
    assert (recents.beacons, recents.late) == ([], [4, 5, 6, 7])
    assert (beacons.beacons, beacons.late) == ([4, 5, 6, 7], [])


def test_first_eviction_of_a_sequence():
    """Beacons at the current position, recents at their own, the maximum over all."""
    stream = ref.draw(np.random.default_rng(1), heads=1, group=2, tokens=9, dim=4, prompt=8)
    policy, budget = ref.Beacon(n_beacon=2, n_recent=2), ref.Budget(8, 1, 1)
    outcome = ref.simulate(policy, stream, budget)
    rows = []
    for g in range(2):
        observing = [
            (stream.rope(stream.qpre[0, g, b], 7), 7) for b in ref.fps(stream.qpre[0, g, :6], 2)
        ]
        observing += [(stream.q[0, g, 6], 6), (stream.q[0, g, 7], 7)]
        for query, until in observing:
            weights = np.exp(stream.k[0, :8] @ query / 2.0)
            weights[until + 1 :] = 0
            rows.append(weights / weights.sum())
    assert outcome.evictions[0].scores[0] == pytest.approx(np.max(rows, axis=0))
    # 8 - 7 = 1 goes: the lowest but the sink and the two recents.
    gone = 1 + int(np.argmin(np.max(rows, axis=0)[1:6]))
    assert outcome.e[0].tolist() == [8 if t == gone else ref.NEVER for t in range(9)]


@pytest.mark.parametrize("space", ["pre_rope", "post_rope"])
def test_initial_beacons_stay_for_ever(space):
    stream, budget = ref.draw(np.random.default_rng(2), prompt=1, tokens=60), ref.Budget(16, 2, 2)
    state = ref.Beacon(n_beacon=3, n_recent=2, selector="initial", space=space).start(
        stream, budget
    )
    assert isinstance(state, ref.BeaconState)
    cached = [np.arange(0)] * 2
    for position in range(60):
        if len(cached[0]) == 16:
            scores = state.scores(cached, position - 1)
            assert all(b.beacons == [0, 1, 2] for row in state.buffers for b in row)
            assert [b.late for b in state.buffers[0]] == [[position - 2, position - 1]] * 2
            assert all(len(row) == 16 for row in scores)
            cached = [kept[4:] for kept in cached]
            state.evicted(cached, position - 1)
        cached = [np.append(kept, position) for kept in cached]
        state.observe(ref.Observation(cached, position, 1))


def test_spaces_and_rerotation_differ():
    stream, budget = ref.draw(np.random.default_rng(4), prompt=30, tokens=31), ref.Budget(30, 2, 2)

    def scores(**options) -> np.ndarray:
        policy = ref.Beacon(n_beacon=2, n_recent=2, **options)
        return ref.simulate(policy, stream, budget).evictions[0].scores[0]

    pre, post = scores(), scores(space="post_rope")
    again = scores(space="post_rope", rerotate=True)
    assert not np.allclose(pre, post) and not np.allclose(post, again)


def test_tied_queries_leave_no_near_tie():
    stream = ref.draw(np.random.default_rng(6), tied_queries=0.7, tokens=80, prompt=30)
    outcome = ref.simulate(ref.Beacon(n_beacon=4, n_recent=4), stream, ref.Budget(32, 2, 2))
    assert outcome.clear_until(rtol=1e-9, atol=1e-9) == len(outcome.evictions) > 5
