"""Spherical k-means on clusters that anybody would find."""

import math

import torch

from kvpolicies.kernels.kmeans import cluster_means, spherical_kmeans


def at(*degrees: float, length: float = 1.0) -> torch.Tensor:
    """Plane vectors [N, 2] by their angle."""
    angle = torch.tensor(degrees) * math.pi / 180
    return length * torch.stack([angle.cos(), angle.sin()], dim=-1)


def partition(members: torch.Tensor) -> set[frozenset[int]]:
    """The clusters as sets of indices."""
    assert (members.sum(0) == 1).all(), "a query belongs to one centre"
    return {frozenset(row.nonzero()[:, 0].tolist()) for row in members}


def test_obvious_clusters_their_middles_and_who_is_nearest() -> None:
    queries = at(0, 121, 10, 240, 120, 5, 242, 119)
    found = spherical_kmeans(queries, 3)
    assert partition(found.members) == {
        frozenset({0, 2, 5}),
        frozenset({1, 4, 7}),
        frozenset({3, 6}),
    }
    order = [int(found.members[:, i].argmax()) for i in (0, 1, 3)]
    assert torch.allclose(found.centres[order], at(5, 120, 241), atol=1e-6)
    # Of a cluster of two, both are equally near: the first, whatever rounding says.
    assert found.nearest[order].tolist() == [5, 4, 3]


def test_length_plays_no_part_but_in_the_means() -> None:
    queries = torch.cat([at(0, 120, 240), at(4, length=3.0)])
    found = spherical_kmeans(queries, 3)
    owner = int(found.members[:, 0].argmax())
    assert torch.allclose(found.centres[owner], at(2)[0], atol=1e-6)
    assert torch.allclose(
        cluster_means(queries, found)[owner], (queries[0] + queries[3]) / 2, atol=1e-6
    )


def test_a_centre_without_members_stays_and_means_its_nearest() -> None:
    """Three clusters of two distinct directions: the third centre gets nobody."""
    queries = at(0, 90, 0, 90, 90)
    found = spherical_kmeans(queries, 3)
    count = found.members.sum(dim=1)
    assert sorted(count.tolist()) == [0, 2, 3]
    empty = int(count.argmin())
    means = cluster_means(queries, found)
    assert means.isfinite().all() and found.centres.isfinite().all()
    assert torch.equal(means[empty], queries[found.nearest[empty]])


def test_equally_near_centres_a_query_goes_to_the_first() -> None:
    """Two centres in one place: the copy never has members."""
    found = spherical_kmeans(at(0, 0, 0), 2)
    assert found.members.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_members_that_cancel_out_leave_their_centre_where_it_was() -> None:
    queries = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert torch.equal(spherical_kmeans(queries, 1).centres, queries[:1])


def test_every_leading_index_is_clustered_by_itself() -> None:
    g = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 3, 40, 8, generator=g)
    together = spherical_kmeans(queries, 5)
    for i in range(2):
        for j in range(3):
            alone = spherical_kmeans(queries[i, j], 5)
            assert torch.equal(together.members[i, j], alone.members)
            assert torch.equal(together.nearest[i, j], alone.nearest)


def test_rounds_bring_queries_closer_to_their_centres() -> None:
    g = torch.Generator().manual_seed(1)
    queries = torch.nn.functional.normalize(torch.randn(200, 4, generator=g), dim=-1)

    def cohesion(rounds: int) -> float:
        found = spherical_kmeans(queries, 6, rounds)
        return float((found.centres @ queries.T).amax(0).sum())

    values = [cohesion(n) for n in (0, 1, 3, 10)]
    assert values == sorted(values) and values[0] < values[-1]
