"""Options: what is refused, what is printed, and what `shared` and the pools change."""

import pytest
import torch

from kvpolicies.beacon.policy import Beacon
from kvpolicies.beacon.space import Space
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.registry import resolve
from tests.beacon.feeding import feed, layer_for, random_queries, rope


@pytest.mark.parametrize(
    ("options", "hints"),
    [
        ("pool='median'", ["pool", "'median'", "max, mean, soft"]),
        ("selector='kmeans'", ["selector", "'kmeans'", "kmeans_centroid", "naive_fps"]),
        ("refresh='never'", ["refresh", "'never'", "periodic, revisit"]),
        ("space='rope'", ["space", "'rope'", "pre_rope"]),
        ("pool='soft', temperature=0", ["temperature", "above 0", "got 0"]),
        ("pool='soft', temperature=-0.5", ["temperature", "above 0", "-0.5"]),
        ("pool='soft', temperature='warm'", ["temperature", "finite number", "'warm'"]),
        ("temperature=0.5", ["temperature=0.5", "pool='soft'", "pool='max'"]),
        ("refresh='revisit', selector='initial'", ["revisit", "'continual'", "'initial'"]),
        ("refresh='revisit', selector='naive_fps'", ["revisit", "'continual'", "'naive_fps'"]),
        ("shared=1", ["shared", "True or False", "1"]),
        ("n_recent=0", ["n_recent", "[1, 65536]", "0"]),
    ],
)
def test_refused_in_one_line(options: str, hints: list[str]) -> None:
    with pytest.raises(UserError) as error:
        resolve(f"beacon({options})")
    message = str(error.value)
    assert all(hint in message for hint in hints) and "\n" not in message, message


def test_it_prints_as_what_it_was_made_from() -> None:
    spec = "beacon(pool='soft', temperature=0.5, shared=True, refresh='revisit')"
    assert str(resolve(spec)) == spec
    assert str(resolve("beacon(temperature=0.25)")) == "beacon"
    assert resolve("beacon(pool='soft', temperature=2)") == Beacon(pool="soft", temperature=2)


def test_shared_points_have_the_mean_cosine_of_the_groups_heads() -> None:
    queries = random_queries(2, 3, 4, 5, 8)
    points = Space("post_rope", shared=True).points(queries)
    unit = torch.nn.functional.normalize(queries, dim=-1)
    assert points.shape == (2, 3, 1, 5, 32)
    expected = (unit @ unit.mT).mean(dim=2, keepdim=True)
    assert torch.allclose(points @ points.mT, expected, atol=1e-6)


@pytest.mark.parametrize("more", ["", ", space='post_rope'", ", refresh='revisit'"])
def test_shared_beacons_are_the_same_steps_in_all_heads_of_a_group(more: str) -> None:
    queries = random_queries(2, 2, 3, 70, 8)
    steps = {}
    for shared in (True, False):
        spec = f"beacon(n_beacon=4, n_recent=4, shared={shared}{more})"
        layer = layer_for(spec, queries, Budget(32, 2, 4), rope=rope(8))
        steps[shared] = feed(layer, queries, [45, *[1] * 25]).state["when"]
    assert (steps[True] == steps[True][:, :, :1]).all()
    assert (steps[True][:, 0] != steps[True][:, 1]).any(), "groups choose for themselves"
    assert (steps[False] != steps[False][:, :, :1]).any()


def test_a_group_of_one_head_shares_with_nobody() -> None:
    queries = random_queries(1, 2, 1, 70, 8)
    times = [
        feed(layer_for(spec, queries, Budget(24, 2, 4), rope=rope(8)), queries).eviction_times
        for spec in (
            "beacon(n_beacon=4, n_recent=4)",
            "beacon(n_beacon=4, n_recent=4, shared=True)",
        )
    ]
    assert times[0] is not None and times[1] is not None and torch.equal(times[0], times[1])


def test_the_soft_pool_keeps_what_its_neighbours_keep_at_either_end() -> None:
    queries = random_queries(2, 2, 2, 80, 8)

    def times(options: str) -> torch.Tensor | None:
        layer = layer_for(f"beacon(n_beacon=4, n_recent=4, {options})", queries, Budget(24, 2, 4))
        return feed(layer, queries).eviction_times

    for soft, hard in [("1.0", "mean"), ("0.001", "max")]:
        ours, theirs = times(f"pool='soft', temperature={soft}"), times(f"pool='{hard}'")
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
