"""The rule's simulation against sequences worked out by hand, and its properties."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import api as ref
from tests.reference.policies import H2OState, LazyState
from tests.reference.rule import Policy, Stream

NEVER = ref.NEVER


def flat(tokens: int, prompt: int, heads: int = 1, group: int = 1) -> Stream:
    """All keys and queries zero: every attention row is uniform."""
    q = np.zeros((heads, group, tokens, 2))
    return Stream(np.zeros((heads, tokens, 2)), q, q, ref.rotary(2), prompt)


def test_fixture_offers_the_api(reference):
    assert reference.simulate is ref.simulate and set(reference.__all__) <= set(dir(reference))


@pytest.mark.parametrize(
    ("budget", "one", "lazy", "batched", "beacon"),
    [
        # An eighth of 64 is 8; 64 - 7*64/8 = 8.
        (ref.Budget(64), 1, 8, 8, 8),
        # An eighth of 1024 is 128: lazy's 101 is smaller.
        (ref.Budget(1024), 1, 101, 128, 128),
        # 100 // 8 = 12, but 100 - floor(87.5) = 13.
        (ref.Budget(100), 1, 12, 12, 13),
        # topk = 1 caps everything.
        (ref.Budget(37), 1, 1, 1, 1),
        (ref.Budget(80, 4, 73), 1, 3, 3, 3),
        # An eighth of 6 is nothing: at least one.
        (ref.Budget(6, 1, 1), 1, 1, 1, 1),
    ],
)
def test_decode_drop(budget, one, lazy, batched, beacon):
    for policy in (ref.Streaming(), ref.Tova(), ref.H2O()):
        assert ref.decode_drop(policy, budget) == one
    assert ref.decode_drop(ref.Lazy(), budget) == lazy
    for policy in (ref.SnapKV(), ref.RPC(), ref.RKV(), ref.KeyDiff()):
        assert ref.decode_drop(policy, budget) == batched
    assert ref.decode_drop(ref.Beacon(), budget) == beacon


def test_a_prompt_evicts_half_the_topk_whatever_is_left_of_it():
    # topk = 28: chunk 14. snapkv drops 8 while decoding.
    budget = ref.Budget(64)
    assert [ref.eviction_size(ref.SnapKV(), budget, p) for p in (True, False)] == [14, 8]
    assert [ref.eviction_size(ref.Streaming(), budget, p) for p in (True, False)] == [14, 1]
    # topk = 1: the chunk is not zero.
    assert ref.eviction_size(ref.Streaming(), ref.Budget(37), True) == 1


def test_a_policy_protects_more_where_there_is_room():
    budget, positions = ref.Budget(20, 2, 3), np.arange(20)
    # Window max(3, min(8, 20-2-2)) = 8: positions 12..19.
    shield = ref.protected(ref.RKV(), budget, positions, 19, 2)
    assert np.flatnonzero(shield).tolist() == [0, 1, *range(12, 20)]
    # Dropping 13 leaves room for max(3, min(8, 5)) = 5.
    shield = ref.protected(ref.RKV(), budget, positions, 19, 13)
    assert np.flatnonzero(shield).tolist() == [0, 1, *range(15, 20)]
    # Faithful TOVA protects nothing.
    assert not ref.protected(ref.Tova(faithful=True), budget, positions, 19, 1).any()


def test_ties_keep_the_larger_position():
    # Lowest is slot 3; among the tied three the smallest position is slot 1's.
    scores, positions = np.array([1.0, 1, 1, 0]), np.array([7, 3, 5, 9])
    free = np.zeros(4, dtype=bool)
    assert ref.lowest(scores, positions, 2, free) == [3, 1]
    assert ref.lowest(scores, positions, 2, positions == 3) == [3, 2]
    with pytest.raises(ValueError, match="NaN"):
        ref.lowest(np.array([np.nan]), np.array([0]), 1, free[:1])


def test_margin_is_between_the_last_dropped_and_the_first_kept():
    scores, free = np.array([4.0, 1, 2, 2]), np.zeros(4, dtype=bool)
    assert ref.margin(scores, 1, free) == 1.0
    assert ref.margin(scores, 2, free) == 0.0
    assert ref.relative_margin(scores, 3, free) == 0.5
    assert ref.margin(scores, 1, np.array([False, True, False, True])) == 2.0
    # Signed scores are rounded like the largest of them: (0.1 - -0.1) / 4.
    assert ref.relative_margin(np.array([-4.0, -0.1, 0.1]), 2, free[:3]) == pytest.approx(0.05)
    # Scores below float32's range cannot be significantly different.
    assert ref.relative_margin(np.array([1e-45, 2e-40]), 1, free[:2]) < 1e-9
    assert ref.margin(scores, 4, free) == np.inf
    assert ref.margin(np.array([np.inf, np.inf]), 1, free[:2]) == 0.0
    assert ref.relative_margin(np.array([0.0, np.inf]), 1, free[:2]) == np.inf


def test_streaming_in_decode():
    # Six slots fill with 0..5; then the oldest beyond two sinks makes room for each newcomer.
    outcome = ref.simulate(ref.Streaming(), flat(10, prompt=3), ref.Budget(6, 2, 1))
    assert outcome.e[0].tolist() == [NEVER, NEVER, 6, 7, 8, 9, *[NEVER] * 4]
    assert [kept[0].tolist() for kept in outcome.kept[:2]] == [[0, 1, 3, 4, 5], [0, 1, 4, 5, 6]]
    assert outcome.final[0].tolist() == [0, 1, 6, 7, 8, 9]
    assert outcome.max_slots == 6


def test_streaming_in_prefill():
    # topk = 4: chunks of 2. 0..5 come in, 1 2 go for 6 7, 3 4 for 8 9, and 5 6 for 10, the last
    # of the prompt; the slot that is then free takes 11, the first decoded token.
    outcome = ref.simulate(ref.Streaming(), flat(12, prompt=11), ref.Budget(6, 1, 1))
    assert outcome.e[0].tolist() == [NEVER, 6, 6, 8, 8, 10, 10, *[NEVER] * 5]
    assert [e.position for e in outcome.evictions] == [5, 7, 9]


def test_batches_leave_room_that_is_used_before_the_next_eviction():
    # An eighth of 16 is 2: after each eviction two tokens fit.
    outcome = ref.simulate(ref.SnapKV(), flat(20, prompt=16), ref.Budget(16, 2, 2))
    assert [(e.position, e.n_drop) for e in outcome.evictions] == [(15, 2), (17, 2)]


def test_new_tokens_take_the_room_that_the_prompt_left():
    # topk 28, chunk 14: three tokens of the prompt come, and of eleven free slots five are taken.
    outcome = ref.simulate(ref.SnapKV(), flat(72, prompt=67), ref.Budget(64))
    assert [(e.position, e.n_drop) for e in outcome.evictions] == [(63, 14)]
    assert len(outcome.final[0]) == 58


def test_h2o_sums_over_all_queries_and_the_group():
    # Uniform rows of 1, 2, 3 slots: token 0 has 1 + 1/2 + 1/3, token 1 1/2 + 1/3, token 2 1/3,
    # twice (two query heads). Token 2 goes; token 3 then sees three slots and gets 1/3: it goes.
    stream, budget = flat(5, prompt=3, group=2), ref.Budget(3, 0, 0)
    outcome = ref.simulate(ref.H2O(), stream, budget)
    assert outcome.evictions[0].scores[0] == pytest.approx([11 / 3, 5 / 3, 2 / 3])
    assert outcome.evictions[1].scores[0] == pytest.approx([13 / 3, 7 / 3, 2 / 3])
    assert outcome.e[0].tolist() == [NEVER, NEVER, 3, 4, NEVER]


def test_h2o_forgets_what_is_evicted():
    stream = flat(3, prompt=3)
    state = ref.H2O().start(stream, ref.Budget(3, 0, 0))
    assert isinstance(state, H2OState)
    state.observe(ref.Observation([np.arange(3)], 0, 3))
    state.evicted([np.array([0, 2])], 2)
    assert state.mass[0] == pytest.approx([11 / 6, 0, 1 / 3])


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        # Every look counts, also at oneself: gaps of one.
        (1e-4, {0: (3, 1), 1: (3, 1), 2: (3, 1), 3: (3, 1)}),
        # A third counts and a quarter does not: all three at step 2.
        (0.3, {0: (2, 1), 1: (2, 1), 2: (2, 1), 3: (2, 0)}),
        # Nobody ever looks: the prompt, which nobody watches, ends at 1; token 3 came after 2.
        (0.6, {0: (1, 0), 1: (1, 0), 2: (1, 0), 3: (2, 0)}),
    ],
)
def test_lazy_follows_each_query_after_the_prompt(alpha, expected):
    state = ref.Lazy(alpha=alpha).start(flat(4, prompt=2), ref.Budget(4, 0, 0))
    assert isinstance(state, LazyState)
    state.observe(ref.Observation([np.arange(2)], 0, 2))
    state.observe(ref.Observation([np.arange(4)], 2, 2))
    pairs = zip(state.last[0].tolist(), state.longest[0].tolist(), strict=True)
    assert dict(enumerate(pairs)) == expected


def test_lazy_takes_the_maximum_over_the_group_and_scores_at_the_newest_position():
    # Query head 0 is uniform; head 1 gives token 0 nearly 1 (the mean, at most .75, is too low).
    # At p = 2 token 0 has TS 2, MRI 1: 2 sigma(-1) + 2 sigma(0); the others never recurred.
    stream = flat(4, prompt=1, group=2)
    q = stream.q.copy()
    stream.k[0, 0], q[0, 1] = [20.0, 0], [20.0, 0]
    stream = Stream(stream.k, q, q, stream.rope, 1)
    outcome = ref.simulate(ref.Lazy(alpha=0.8), stream, ref.Budget(3, 0, 0))
    assert outcome.evictions[0].scores[0] == pytest.approx([1 + 2 / (1 + np.e), 0, 0])
    # All heads uniform, alpha .4: at p = 1 both look alike, at p = 2 nobody is looked at.
    outcome = ref.simulate(ref.Lazy(alpha=0.4), flat(4, prompt=1), ref.Budget(3, 0, 0))
    assert outcome.evictions[0].scores[0] == pytest.approx(
        [1 + 2 / (1 + np.exp(2))] * 2 + [0], abs=1e-5
    )


def test_which_queries_observe():
    """Twelve tokens fill the slots; at p = 11 the newest query, or the newest n, decide."""
    stream, budget = ref.draw(np.random.default_rng(8), tokens=13, prompt=5), ref.Budget(12, 1, 2)
    k, q, at = stream.k[:, :12], stream.q, np.arange(12)

    def first(policy: Policy) -> np.ndarray:
        return np.array(ref.simulate(policy, stream, budget).evictions[0].scores)

    assert first(ref.Tova())[1] == pytest.approx(ref.tova_scores(k, q[:, :, 11]))
    rows, taus = q[1, :, 8:12], at[8:]
    snapkv = ref.snapkv_scores(k[1], at, rows, taus)
    assert first(ref.SnapKV(observe_window=4))[1] == pytest.approx(snapkv)
    rpc = ref.rpc_scores(k, at, q[:, :, 8:12], taus, first=1)
    assert (first(ref.RPC(observe_window=4))[1] == rpc).all()
    assert first(ref.RKV(alpha=4))[1] == pytest.approx(ref.rkv_scores(k[1], at, rows, taus))
    # All that exist, where more are wanted.
    snapkv = ref.snapkv_scores(k[1], at, q[1, :, :12], at)
    assert first(ref.SnapKV())[1] == pytest.approx(snapkv)


def test_drawn_queries_are_rotated_to_their_own_positions():
    stream = ref.draw(np.random.default_rng(9), tokens=5, prompt=1)
    for t in range(5):
        rotated = stream.rope(stream.qpre[:, :, t], t)
        assert stream.q[:, :, t] == pytest.approx(rotated, rel=1e-6, abs=1e-6)
        assert (stream.q[:, :, t] == stream.q[:, :, t].astype(np.float32)).all()


def test_whole_numbers_stay_whole_at_every_position():
    stream = ref.draw_whole(np.random.default_rng(9), tokens=9, dim=4, prompt=1)
    for t in range(9):
        assert (stream.q[:, :, t] == stream.rope(stream.qpre[:, :, t], t)).all()
    assert (np.abs(stream.q) == 1).all() and (np.abs(stream.k) == 1).all()
    # A quarter turn takes the first half to the second; pair 1 makes two.
    turned = ref.quarter_turns(4)(np.array([1.0, 2, 3, 4]), 1)
    assert turned.tolist() == [-3, -2, 1, -4]


@pytest.mark.parametrize("dim", [4, 16, 64])
def test_one_hot_weights_are_exact_in_float32(dim):
    stream = ref.draw_whole(np.random.default_rng(9), dim=dim, one_hot=True, repeated=0.4)
    every, shares = np.arange(stream.tokens), []
    for h in range(2):
        rows = ref.causal_rows(stream.q[h], every, stream.k[h], every)
        shares += rows[rows > 0].tolist()
    assert set(shares) == {1.0, 1 / 2} and np.abs(stream.k).max() * 64 * dim < 2**37


def test_rpc_with_few_older_keys_drops_the_smallest_positions():
    # Eight slots, 32 queries wanted: all observe, nothing is older, all +inf: sinks stay.
    outcome = ref.simulate(ref.RPC(), flat(9, prompt=8), ref.Budget(8, 1, 1))
    assert outcome.e[0].tolist() == [NEVER, 8, *[NEVER] * 7]


def test_equal_keys_tie_exactly_and_go_oldest_first():
    rng = np.random.default_rng(3)
    stream = ref.draw(rng, tokens=40, prompt=10)
    stream.k[:] = stream.k[:, :1]
    budget = ref.Budget(16, 2, 4)
    keydiff = ref.simulate(ref.KeyDiff(every=1), stream, budget)
    assert (keydiff.e == ref.simulate(ref.Streaming(), stream, budget).e).all()
    assert all(e.margins == [0.0, 0.0] and not e.near_tie() for e in keydiff.evictions)


def test_drawn_duplicates_give_exact_ties():
    stream = ref.draw(np.random.default_rng(0), tied_keys=0.6, tokens=60, prompt=20)
    outcome = ref.simulate(ref.KeyDiff(every=1), stream, ref.Budget(16, 2, 4))
    assert any(0.0 in e.margins for e in outcome.evictions)
    assert outcome.clear_until() == len(outcome.evictions)


def small_policies() -> list[Policy]:
    others = [make() for name, make in ref.POLICIES.items() if name != "beacon"]
    return [
        *others,
        ref.Tova(faithful=True),
        ref.Beacon(n_beacon=4, n_recent=3),
        ref.Beacon(n_beacon=0, n_recent=6),
        ref.Beacon(n_beacon=4, n_recent=3, selector="initial", pool="mean", space="post_rope"),
    ]


@pytest.mark.parametrize("policy", small_policies(), ids=repr)
@pytest.mark.parametrize("prompt", [1, 13, 50])
def test_what_every_policy_holds_to(policy, prompt):
    stream, budget = ref.draw(np.random.default_rng(prompt), prompt=prompt), ref.Budget(24, 2, 5)
    outcome = ref.simulate(policy, stream, budget)
    assert outcome.evictions and outcome.max_slots == budget.total
    sinks, window = policy.protection(budget)
    for eviction in outcome.evictions:
        first_unseen = eviction.position + 1
        for h, kept in enumerate(eviction.kept):
            assert len(kept) == budget.total - eviction.n_drop
            newest = range(first_unseen - window, first_unseen)
            assert set(range(sinks)) | set(newest) <= set(kept.tolist())
            seen_later = np.flatnonzero(outcome.e[h, :first_unseen] > first_unseen)
            assert kept.tolist() == seen_later.tolist()
        if isinstance(policy, ref.Tova | ref.RPC):
            assert (eviction.kept[0] == eviction.kept[1]).all()


def test_h2o_equals_the_replay_of_its_own_eviction_times():
    """The mass at the last eviction, read off one dense masked softmax over the sequence."""
    stream, budget = ref.draw(np.random.default_rng(5)), ref.Budget(24, 2, 5)
    outcome = ref.simulate(ref.H2O(), stream, budget)
    last = outcome.evictions[-1]
    query, key = np.arange(stream.tokens)[:, None], np.arange(stream.tokens)[None, :]
    for h in range(stream.heads):
        seen = (key <= query) & (query < outcome.e[h][None, :])
        weights = np.exp(stream.q[h] @ stream.k[h].T / np.sqrt(8.0)) * seen
        weights /= weights.sum(axis=-1, keepdims=True)
        mass = weights[:, : last.position + 1].sum(axis=(0, 1))
        cached = np.union1d(last.kept[h], last.dropped[h])
        assert last.scores[h] == pytest.approx(mass[cached])
