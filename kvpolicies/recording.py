"""A full-cache run over known tokens, recorded: what a policy that looks ahead is given.

One dense forward; every query's own attention is summed up in one number, the log-sum-exp of its
logits, so that the weight it gives to any key can be had later without a T x T matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicies import adapter
from kvpolicies.architecture import attention_modules, inspect_model
from kvpolicies.kernels.attention import Visible, slot_attention
from kvpolicies.kernels.foresight import causal_lse
from kvpolicies.kernels.softmax import Softmax

Sees = Callable[[int, Tensor, Tensor, Softmax], None]


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

    def see(layer: int, queries: Tensor, keys: Tensor, softmax: Softmax) -> None:
        lse = causal_lse(queries, keys, softmax)
        futures[layer] = Future(queries[0].contiguous(), lse[0])

    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if "logits_to_keep" in adapter._parameters(type(model)):
        arguments["logits_to_keep"] = 1  # nobody reads them
    with watched(model, see):
        model(**arguments)
    return futures


@contextmanager
def watched(model: Any, see: Sees) -> Iterator[None]:
    """Dense causal attention that shows each full layer's queries and keys, before it attends.

    `see` is called as (layer, queries [B, H, G, T, D], keys [B, H, T, D], softmax). A cache that
    the model is attached to steps aside until the block is left.
    """
    spans = inspect_model(model).spans

    def serve(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kw: Any) -> Tensor:
        b, h, t, d = key.shape
        span = spans[module.layer_idx]
        softmax = adapter._softmax(module, h, span, kw)
        queries = query.reshape(b, h, -1, t, d)
        places = torch.arange(t, device=key.device)[None]
        visible = Visible(places)
        if span is None:
            see(module.layer_idx, queries, key, softmax)
        else:
            visible = Visible(places, places - span + 1, places)
        return slot_attention(queries, key, value, visible, softmax).flatten(1, 2)

    attached = {m: adapter._served.pop(m, None) for m in attention_modules(model)}
    try:
        with adapter._serving(model, [serve] * len(spans)):
            yield
    finally:
        adapter._served.update({m: f for m, f in attached.items() if f is not None})
