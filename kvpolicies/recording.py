"""A full-cache run over known tokens, recorded: what a policy that looks ahead is given.

One dense forward; every query's own attention is summed up in one number, the log-sum-exp of its
logits, so that the weight it gives to any key can be had later without a T x T matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicies.adapter import LayerActivations, uncached_forward, watched_dense
from kvpolicies.architecture import attention_modules
from kvpolicies.kernels.causal import causal_lse


@dataclass(frozen=True)
class Future:
    """One sequence's recording at one layer; T tokens, position t at index t."""

    queries: Float[Tensor, "H G T D"]
    """Post-RoPE, in the model's dtype."""
    lse: Float[Tensor, "H G T"]
    """log of the sum of exp(logit) over all keys t <= d, float32."""


@torch.no_grad()
def record(model: Any, tokens: Sequence[int]) -> list[Future | None]:
    """One recording a layer of a full-cache run over `tokens`; None for sliding-window layers.

    Works inside `attach` too: the cache sees nothing of it. Memory: the queries, as many bytes as
    G times the keys of the full cache, until the recording is let go.
    """
    futures: list[Future | None] = [None] * len(attention_modules(model))

    def see(seen: LayerActivations) -> None:
        lse = causal_lse(seen.queries, seen.keys, seen.softmax)
        futures[seen.layer] = Future(seen.queries[0].contiguous(), lse[0])

    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with watched_dense(model, see):
        uncached_forward(model)(ids, positions)
    return futures
