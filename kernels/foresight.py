"""Attention that is still to come, from a recording of it: block by block, no T x T matrix."""

import torch
from torch import Tensor

from kvpolicies.kernels.softmax import Softmax

# Queries handled at once: bounds the logits, however long the sequence.
BLOCK = 128


def causal_lse(queries: Tensor, keys: Tensor, softmax: Softmax) -> Tensor:
    """log of the sum of exp(logit) over all keys up to each query, a model's sink included.

    Args:
        queries: [B, H, G, T, D], post-RoPE, of all positions 0 .. T - 1.
        keys: [B, H, T, D], of the same positions.

    Returns:
        [B, H, G, T] float32. Memory O(BLOCK * T) a head.
    """
    parts = []
    for start in range(0, queries.shape[3], BLOCK):
        block = queries[:, :, :, start : start + BLOCK]
        stop = start + block.shape[3]
        logits = _logits(block, keys[:, :, :stop], softmax)
        t = torch.arange(stop, device=keys.device)
        logits = logits.masked_fill(t > t[start:, None], float("-inf"))
        parts.append(logits.logsumexp(dim=-1))
    lse = torch.cat(parts, dim=-1)
    if softmax.sink is None:
        return lse
    return torch.logaddexp(lse, softmax.sink.float()[None, :, :, None])


def future_mass(queries: Tensor, lse: Tensor, keys: Tensor, softmax: Softmax) -> Tensor:
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
        mass += (_logits(block[None], keys[None], softmax)[0] - norm[..., None]).exp().sum(dim=2)
    return mass


def _logits(queries: Tensor, keys: Tensor, softmax: Softmax) -> Tensor:
    """[B, H, G, n, L] float32."""
    b, h, g, n, d = queries.shape
    products = queries.float().reshape(b, h, g * n, d) @ keys.float().transpose(-1, -2)
    return softmax.logits(products.view(b, h, g, n, keys.shape[2]))
