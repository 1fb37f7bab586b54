"""Spherical k-means of queries, begun from their farthest points: BeaconKV's clustering ablation.

Source: Dhillon and Modha, "Concept decompositions for large sparse text data", 2001, Section 3.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvpolicies.kernels.fps import farthest_points

EPS = 1e-12
# Cosines so close are equal. The two members of a cluster of two are equally near to its centre,
# always; rounding must not choose between them.
TIE = 1e-5


class Clusters(NamedTuple):
    """What `spherical_kmeans` found; all by cosine."""

    centres: Tensor
    """[..., m, D] unit vectors."""
    members: Tensor
    """[..., m, N] float32, one where a query belongs to a centre: its nearest; a tie: the first."""
    nearest: Tensor
    """[..., m] int64, the query nearest to each centre, whosever member; of those within `TIE` of
    the highest cosine, the first."""


def spherical_kmeans(queries: Tensor, m: int, rounds: int = 10) -> Clusters:
    """Clusters directions.

    Centres begin as the `m` farthest points, in their order. A round gives each query to its
    nearest centre, then moves each centre to the normalised sum of its unit members; a centre
    without members, or whose members cancel out, stays.

    Args:
        queries: [..., N, D]; N >= m >= 1. Clustered in float32 on L2-normalised queries.
        m: how many clusters.
        rounds: always as many, converged or not, so that nothing waits for the device.
    """
    unit = normalize(queries.float(), dim=-1, eps=EPS)
    first = farthest_points(queries, m)
    centres = unit.gather(-2, first[..., None].expand(*first.shape, unit.shape[-1]))
    for _ in range(rounds):
        total = _members(unit, centres) @ unit
        length = total.norm(dim=-1, keepdim=True)
        centres = torch.where(length > EPS, total / length, centres)
    cosines = centres @ unit.mT
    near = cosines >= cosines.amax(dim=-1, keepdim=True) - TIE
    return Clusters(centres, _members(unit, centres), near.byte().argmax(dim=-1))


def cluster_means(values: Tensor, clusters: Clusters) -> Tensor:
    """Mean of each cluster's `values` [..., N, D], float32 [..., m, D]; without members: nearest's.

    Leading dimensions of `values` and of the clusters broadcast.
    """
    sums = clusters.members @ values.float()
    count = clusters.members.sum(dim=-1)[..., None]
    index = clusters.nearest[..., None].expand(*sums.shape[:-2], -1, values.shape[-1])
    return torch.where(count > 0, sums / count, values.float().gather(-2, index))


def _members(unit: Tensor, centres: Tensor) -> Tensor:
    """[..., m, N]: see `Clusters`."""
    own = (centres @ unit.mT).argmax(dim=-2, keepdim=True)  # [..., 1, N]
    # By comparison, not one_hot, which reads its largest index back.
    return (own == torch.arange(centres.shape[-2], device=own.device)[:, None]).float()
