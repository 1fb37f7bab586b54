"""refresh="revisit": which beacon is replaced, and when."""

import pytest
import torch

from kvpolicies.beacon.exchange import PIECE
from kvpolicies.budget import Budget
from kvpolicies.kernels.logit_transform import LogitTransform
from tests.beacon.feeding import angles, at, feed, layer_for, random_queries, rope
from tests.support.layer import OneLayer, process

THREE = "beacon(n_beacon=3, n_recent=1, refresh='revisit')"


def held(spec: str, *degrees: float, n_beacon: int = 3) -> list[int]:
    """The beacons' angles after such queries, one by one."""
    queries = at(*degrees)
    return angles(feed(layer_for(spec, queries), queries).state["queries"][0, 0, 0, :n_beacon])


def when(layer: OneLayer) -> torch.Tensor:
    """Positions of all entries, -1 = empty."""
    return layer.state["when"] - 1


def test_the_first_to_leave_the_ring_become_beacons_as_they_come() -> None:
    queries = at(0, 20, 40, 45, 50, 55)
    layer = layer_for("beacon(n_beacon=3, n_recent=2, refresh='revisit')", queries)
    assert when(feed(layer, queries[:, :, :, :1])).tolist()[0][0][0] == [-1, -1, -1, 0, -1]
    assert when(feed(layer, queries[:, :, :, 1:4])).tolist()[0][0][0] == [0, 1, -1, 2, 3]
    assert when(feed(layer, queries[:, :, :, 4:])).tolist()[0][0][0] == [0, 1, 2, 4, 5]


def test_the_later_of_the_closest_pair_gives_way_in_place() -> None:
    assert held(THREE, 0, 10, 90, 200, 0) == [0, 200, 90]
    assert held(THREE, 90, 0, 10, 200, 0) == [90, 0, 200]
    assert held(THREE, 0, 90, 10, 200, 0) == [0, 90, 200]


def test_what_a_beacon_stands_for_already_changes_nothing() -> None:
    assert held(THREE, 0, 120, 240, 60, 0) == [0, 120, 240], "closer than the closest pair"
    assert held(THREE, 0, 120, 250, 130, 0) == [0, 120, 250]
    assert held(THREE, 0, 10, 90, 12, 0) == [0, 10, 90], "closer to 10 than 10 to 0"
    assert held(THREE, 0, 10, 90, 21, 0) == [0, 21, 90], "just farther"


def test_of_equally_close_pairs_the_first_gives_way() -> None:
    assert held(THREE, 0, 0, 0, 90, 0) == [0, 90, 0]


def test_a_query_still_in_the_ring_is_no_candidate() -> None:
    assert held(THREE, 0, 10, 90, 200) == [0, 10, 90]


def test_one_after_the_other_each_sees_what_the_last_one_left() -> None:
    # 200 takes 10's place; then 190 is close to it, and the closest pair is far apart.
    assert held(THREE, 0, 10, 90, 200, 190, 0) == [0, 200, 90]


def test_none_or_one_beacon_is_never_exchanged() -> None:
    one = "beacon(n_beacon=1, n_recent=1, refresh='revisit')"
    assert held(one, 5, 180, 90, 0, n_beacon=1) == [5]
    queries = at(0, 10, 20, 30)
    layer = layer_for("beacon(n_beacon=0, n_recent=2, refresh='revisit')", queries)
    assert when(feed(layer, queries)).tolist()[0][0][0] == [2, 3]


@pytest.mark.parametrize("options", ["", ", shared=True", ", space='post_rope'"])
def test_a_prompt_at_once_or_token_by_token(options: str) -> None:
    queries = random_queries(2, 2, 2, 40, 8)
    spec = f"beacon(n_beacon=4, n_recent=3, refresh='revisit'{options})"
    layers = [
        feed(layer_for(spec, queries, rope=rope(8)), queries, sizes)
        for sizes in ([40], None, [17, 1, 22])
    ]
    for other in layers[1:]:
        assert torch.equal(when(other), when(layers[0]))
    assert (when(layers[0])[..., :4] != torch.arange(4)).any(), "nothing was ever exchanged"


def test_a_prompt_of_several_pieces_is_taken_in_token_by_token() -> None:
    queries = random_queries(1, 2, 2, 2 * PIECE + 9, 8)
    budget, spec = Budget(4 * PIECE, 0, 1), "beacon(n_beacon=6, n_recent=5, refresh='revisit')"
    at_once, one_by_one = (
        feed(layer_for(spec, queries, budget, rope=rope(8), length=3 * PIECE), queries, sizes)
        for sizes in ([queries.shape[3]], None)
    )
    assert torch.equal(when(at_once), when(one_by_one))


def test_rows_of_different_age_in_one_step() -> None:
    """One row fills its ring, one its beacons, one exchanges: each as if it were alone."""
    queries, spec = random_queries(3, 2, 2, 30, 8), "beacon(n_beacon=6, n_recent=4)"
    spec = spec.replace(")", ", refresh='revisit')")
    together = layer_for(spec, queries, rope=rope(8))
    ages, alone = [1, 6, 20], []
    for row, age in enumerate(ages):
        alone.append(layer_for(spec, queries[:1], rope=rope(8)))
        for layer, place in ((alone[-1], 0), (together, row)):
            _bring(layer, queries[row : row + 1, :, :, :age], place)
    for i in range(8):
        step = torch.stack([queries[row, :, :, age + i] for row, age in enumerate(ages)])
        _bring(together, step[:, :, :, None], 0)
        for row, layer in enumerate(alone):
            _bring(layer, step[row : row + 1, :, :, None], 0)
            assert torch.equal(when(layer)[0], when(together)[row])
            assert torch.equal(layer.state["queries"][0], together.state["queries"][row])


def _bring(layer: OneLayer, queries: torch.Tensor, first: int) -> None:
    from kvpolicies.step import LayerInput

    b, h, _, n, d = queries.shape
    keys = torch.zeros(b, h, n, d)
    process(
        layer,
        LayerInput(queries, keys, keys, None, LogitTransform(0.5)),
        range(first, first + b),
        [n] * b,
    )


def test_a_shared_decision_goes_by_the_mean_cosine_of_the_groups_heads() -> None:
    # Head one alone would give up 10 for 200; head two says that 200 is nothing new.
    one, two = at(0, 10, 90, 200, 0), at(0, 100, 240, 0, 0)
    queries = torch.cat([one, two], dim=2)
    apart, shared = (
        when(feed(layer_for(THREE.replace(")", more), queries), queries))[0, 0, :, :3].tolist()
        for more in (")", ", shared=True)")
    )
    assert apart == [[0, 3, 2], [0, 1, 2]]
    assert shared[0] == shared[1]
    # Means: pair (0, 10) .41, (0, 90) -.25, (10, 90) -.30; 200 to 0: .03, to 10: -.58, to 90: -.42
    assert shared[0] == [0, 3, 2]
