"""Selectors that keep every query: what they choose, and what they cost."""

import pytest
import torch

import kvpolicies
from kvpolicies.beacon.history import SELECTORS
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.fps import sampled
from kvpolicies.registry import resolve
from tests.beacon.feeding import angles, at, feed, layer_for, random_queries, rope
from tests.support.layer import OneLayer
from tests.support.models import tiny


def spec(selector: str, n_beacon: int = 3, n_recent: int = 2, more: str = "") -> str:
    return f"beacon(n_beacon={n_beacon}, n_recent={n_recent}, selector={selector!r}{more})"


def looking(layer: OneLayer):
    """The observers of the layer as it is."""
    return layer.policy.memory.looking(layer.view(slice(0, layer.geometry.rows)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("selector", SELECTORS)
def test_fewer_queries_than_beacons_are_all_beacons(selector: str) -> None:
    queries = at(10, 20, 30, 40)
    seen = looking(feed(layer_for(spec(selector), queries), queries))
    assert seen.valid.tolist() == [[True, True, False, True, True]]
    assert angles(seen.queries[0, 0, 0][seen.valid[0]]) == [10, 20, 30, 40]
    assert seen.positions[0, 3:].tolist() == [2, 3]


@pytest.mark.parametrize("selector", SELECTORS)
def test_before_the_ring_is_full_there_are_only_recents(selector: str) -> None:
    queries = at(10)
    seen = looking(feed(layer_for(spec(selector), queries), queries))
    assert seen.valid.tolist() == [[False, False, False, False, True]]
    assert angles(seen.queries[0, 0, 0, 4:]) == [10]


@pytest.mark.parametrize("selector", SELECTORS)
def test_no_beacons_wanted(selector: str) -> None:
    queries = at(10, 20, 30, 40)
    seen = looking(feed(layer_for(spec(selector, 0), queries), queries))
    assert angles(seen.queries[0, 0, 0]) == [30, 40] and seen.valid.all()


CLUSTERS = at(0, 121, 10, 240, 120, 5, 242, 119, 77, 78)  # the last two are recents


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("kmeans_nearest", {5, 120, 240}), ("kmeans_centroid", {5, 120, 241})],
)
@pytest.mark.parametrize("more", ["", ", space='post_rope'", ", shared=True"])
def test_beacons_of_obvious_clusters(selector: str, expected: set[int], more: str) -> None:
    layer = feed(layer_for(spec(selector, more=more), CLUSTERS), CLUSTERS)
    assert set(angles(looking(layer).queries[0, 0, 0, :3])) == expected


def test_naive_fps_samples_all_older_queries_as_they_were_before_rope() -> None:
    queries = random_queries(2, 2, 2, 40, 8)
    turn = rope(8)
    turn.prepare(64, queries.device)
    when = torch.arange(40)[None].expand(2, -1)
    layer = layer_for(spec("naive_fps", 5, 3), queries, rope=turn)
    seen = looking(feed(layer, turn.rotate(queries, when), [30, *[1] * 10]))
    expected = turn.rotate(sampled(queries[:, :, :, :37], 5), torch.full((2, 5), 39))
    assert torch.allclose(seen.queries[:, :, :, :5], expected, atol=1e-5)
    assert torch.allclose(seen.queries[:, :, :, 5:], turn.rotate(queries, when)[:, :, :, 37:])
    assert seen.positions.tolist() == [[39] * 5 + [37, 38, 39]] * 2


def test_beacons_are_chosen_from_the_evicted_past_too() -> None:
    """The history does not shrink with the cache, nor does thinning lose what FPS would find."""
    queries = at(180, *[float(i % 30) for i in range(60)])
    layer = layer_for(spec("naive_fps", 2, 2), queries, Budget(16, 0, 2))
    assert 180 in angles(looking(feed(layer, queries)).queries[0, 0, 0, :2])


@pytest.mark.parametrize("selector", SELECTORS)
def test_shared_beacons_are_the_same_steps_in_all_heads_of_a_group(selector: str) -> None:
    if selector == "kmeans_centroid":
        pytest.skip("a centroid is no step")
    queries = random_queries(1, 2, 3, 30, 8)
    seen = looking(feed(layer_for(spec(selector, 4, more=", shared=True"), queries), queries))
    match = (seen.queries[..., :4, None, :] == queries[:, :, :, None]).all(-1)  # [1, H, G, 4, 30]
    steps = match.int().argmax(-1)
    assert match.any(-1).all() and (steps == steps[:, :, :1]).all()
    assert (steps[:, 0] != steps[:, 1]).any(), "groups choose for themselves"


@pytest.mark.parametrize("selector", SELECTORS)
def test_state_bytes_are_those_of_the_whole_history(selector: str) -> None:
    model, length = tiny(), 300
    cache = kvpolicies.FixedBudgetCache(model, spec(selector), Budget(32, 2, 8), max_length=length)
    for dtype in (torch.float32, torch.bfloat16):
        cache.allocate(2, dtype, torch.device("cpu"))
        layers, heads, groups, dim = 2, 2, 2, 16
        assert cache.state_bytes() == layers * heads * groups * length * (dim * dtype.itemsize + 4)


@pytest.mark.parametrize("selector", SELECTORS)
def test_without_a_longest_length_they_are_refused(selector: str) -> None:
    with pytest.raises(UserError, match=rf"{selector}.*every query.*max_length"):
        layer_for(spec(selector), at(0.0), length=0)


def test_a_sequence_that_outgrows_its_length_is_refused() -> None:
    queries = at(*range(12))
    with pytest.raises(UserError, match=r"naive_fps.*10.*longer"):
        feed(layer_for(spec("naive_fps"), queries, length=10), queries[:, :, :, :12])


def test_a_bounded_memory_does_not_ask_for_a_length() -> None:
    for bounded in ("beacon", "beacon(refresh='revisit')"):
        state = layer_for(bounded, random_queries(1, 1, 2, 1, 4), length=0).state
        assert state["queries"].shape == (1, 1, 2, 32, 4)
        assert resolve(bounded).memory.size == 32
