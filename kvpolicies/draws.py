"""Random numbers that belong to a sequence, layer and head, in any batch and order: hashes."""

import torch
from torch import Tensor

from kvpolicies.policy import View
from kvpolicies.transfer import on_device


def mix(x: Tensor) -> Tensor:
    """One round of a 64-bit integer hash (Murmur3's finaliser, shifts kept non-negative)."""
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x00AE502812AA7333
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x3B314601E57A13AD
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def of_heads(view: View, seed: int = 0) -> Tensor:
    """[B, H] int64, of each row's sequence, the layer and the KV head."""
    rows, heads = on_device(view.seeds, view.keys.device), view.positions.shape[1]
    x = mix(rows + 1_000_003 * seed % (1 << 63))[:, None]
    head = view.geometry.first_head + torch.arange(heads, device=x.device)
    return mix(x + 65_537 * view.layer + head)


def uniform(x: Tensor) -> Tensor:
    """Hashes as float64 numbers between 0 and 1, neither of which they reach."""
    return ((x & 0xFFFFFF).double() + 0.5) / (1 << 24)


def normal(x: Tensor) -> Tensor:
    """Standard normal numbers, float64, one for two hashes [..., 2] (Box and Muller)."""
    first, second = uniform(x).unbind(dim=-1)
    return (-2 * first.log()).sqrt() * (2 * torch.pi * second).cos()
