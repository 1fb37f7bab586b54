"""Attention that is still to come, from a recording of it: block by block, no T x T matrix."""

import torch
from torch import Tensor

from kvpolicies.kernels.causal import grouped_logits
from kvpolicies.kernels.logit_transform import LogitTransform

# Queries handled at once: bounds the logits, however long the sequence.
BLOCK = 128


def future_mass(queries: Tensor, lse: Tensor, keys: Tensor, softmax: LogitTransform) -> Tensor:
    """The attention that recorded queries give to each key: the sum of exp(logit - lse).

    Args:
        queries: [H, G, N, D], all of them later than any key.
        lse: [H, G, N] float32, as `causal_lse` gives it.
        keys: [H, L, D], in any order.

    Returns:
        [H, G, L] float32; zeros if N = 0. Memory O(BLOCK * L) a head.
    """
    mass = torch.zeros(*queries.shape[:2], keys.shape[1], device=keys.device)
    for block, norm in zip(queries.split(BLOCK, 2), lse.split(BLOCK, 2), strict=True):
        logits = grouped_logits(block[None], keys[None], softmax)[0]
        mass += (logits - norm[..., None]).exp().sum(dim=2)
    return mass
