"""Forced tokens and made-up recordings for policies that look ahead."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicies.kernels.causal import causal_lse
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.recording import Future
from tests.support.models import prompts


def continuation(prompt: Sequence[int], n: int) -> list[int]:
    """n random tokens that belong to the prompt: the same in any batch."""
    return prompts(n, seed=sum(prompt))[0]


def future_of(queries: Tensor, keys: Tensor, scale: float) -> Future:
    """The recording of queries [H, G, T, D] over keys [H, T, D]."""
    return Future(queries, causal_lse(queries[None], keys[None], LogitTransform(scale))[0])


def random_future(heads: int, groups: int, length: int, dim: int, seed: int = 0) -> Future:
    """A recording of nothing real."""
    g = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads, groups, length, dim, generator=g)
    return future_of(queries, torch.randn(heads, length, dim, generator=g), 0.5)
