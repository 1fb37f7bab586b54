"""Farthest-point sampling of queries by cosine (BeaconKV, Section "Farthest point sampling")."""

import torch
from torch import Tensor


def farthest_points(queries: Tensor, m: int) -> Tensor:
    """Chooses `m` mutually distant queries.

    First the query whose mean cosine to all is lowest (its cosine to their sum: O(N)), then m - 1
    times the query whose highest cosine to the chosen ones is lowest. Ties: the smaller index.

    Args:
        queries: [..., N, D]; N >= m >= 1. Scored in float32 on L2-normalised queries.
        m: how many to choose.

    Returns:
        [..., m] int64 indices into N, in the order of choice; distinct.
    """
    unit = torch.nn.functional.normalize(queries.float(), dim=-1, eps=1e-12)
    total = unit.sum(dim=-2, keepdim=True)
    chosen = [(unit * total).sum(-1).argmin(dim=-1)]
    highest = torch.full(unit.shape[:-1], float("-inf"), device=unit.device)
    for _ in range(m - 1):
        last = chosen[-1][..., None]
        point = unit.gather(-2, last[..., None].expand(*last.shape, unit.shape[-1]))
        highest = torch.maximum(highest, (unit * point).sum(-1))
        # A chosen query never comes again, not even among exact copies of itself.
        highest.scatter_(-1, last, float("inf"))
        chosen.append(highest.argmin(dim=-1))
    return torch.stack(chosen, dim=-1)


def sampled(queries: Tensor, m: int) -> Tensor:
    """The `m` queries [..., m, D] that `farthest_points` chooses from [..., N, D], in its order."""
    index = farthest_points(queries, m)
    return queries.gather(-2, index[..., None].expand(*index.shape, queries.shape[-1]))
