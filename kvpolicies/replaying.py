"""Replay: one masked dense forward over a trace's tokens gives the decode's own logits.

It is the test of any policy, kernel or cache change: the mask knows nothing of slots, only of
eviction times. It does not cover re-rotated keys (`streaming(positions="cache")`).

Where keys and values were stored in fewer bits, the dense forward reads them back from codes too,
each token's own included, as the decode does. Codes are rounded, so that where the two forwards
differ in the last bit of a number half-way between two codes, the codes differ by one step: the
logits agree to rounding but for that, and in float64 to 1e-4 as ever (under policies that ask for
attention weights, which are always float32, as in float32).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicies.adapter import forward, masked_dense
from kvpolicies.positions import check_words
from kvpolicies.trace import EvictionTrace


@torch.no_grad()
def replay(model: Any, trace: EvictionTrace) -> Float[Tensor, "B T V"]:
    """Logits of every position when query q sees key t iff t <= q < e[t], float32.

    Position t's logits predict token t + 1. Memory: a [B, H, T, T] mask a layer. What lies behind
    the end of a shorter sequence is padding; ignore its logits.

    Args:
        model: the transformers decoder that made the trace; put back as it was on return.
        trace: of as many layers and KV heads as the model has.

    Raises:
        UserError: for a token that the model has not.
    """
    device = next(model.parameters()).device
    check_words(model, [0, int(trace.tokens.max())], "the trace")
    tokens = trace.tokens.to(device)
    times = EvictionTrace(trace.times.to(device), tokens)
    kind = None if trace.kv_dtype == "auto" else trace.kv_dtype
    positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)
    with masked_dense(model, times.visible, kind):
        return forward(model, tokens.clamp_min(0), positions)
