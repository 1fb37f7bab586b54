"""Nets that learn what KVzip would keep from the attention's input: KVzap's and Fast KVzip's.

Parameters have the names and shapes of their authors' published weights, as far as these are one
module's (importing.py).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpolicies.learned.config import ScorerConfig
from kvpolicies.learned.nets import ScorerInput, State

SINKS = 16
"""Fixed keys that a token is held against, in Fast KVzip's gates."""


class LogScore(nn.Module):
    """kvzap: log of KVzip's score, a linear map of the input; with `hidden` units a GELU between
    two (KVzap, arXiv 2601.07891)."""

    def __init__(self, config: ScorerConfig):
        super().__init__()
        e, hidden, h = config.input_size, config.hidden, config.heads
        self.first = nn.Linear(e, hidden) if hidden else None
        self.last = nn.Linear(hidden or e, h)

    def forward(self, seen: ScorerInput, state: State) -> tuple[Tensor, State]:
        """(scores [B, H, S], state as it was)."""
        assert seen.inputs is not None
        x = seen.inputs if self.first is None else F.gelu(self.first(seen.inputs))
        return self.last(x).transpose(1, 2), state


class SinkGate(nn.Module):
    """fastkvzip: mean over the group of 1 / (1 + sum over sinks s of exp(q.s / r - (q.k / r + b))),
    with q and k of `hidden` = r^2 numbers, normalised (Fast KVzip, arXiv 2601.17668)."""

    def __init__(self, config: ScorerConfig):
        super().__init__()
        e, d, h, g = config.input_size, config.hidden, config.heads, config.groups
        self.q_proj, self.k_proj = nn.Linear(e, h * g * d), nn.Linear(e, h * d, bias=False)
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        drawn = torch.empty(h, 1, SINKS, d)
        self.k_base = nn.Parameter(drawn if drawn.is_meta else drawn.normal_())
        self.b = nn.Parameter(torch.zeros(h, 1, g))

    def forward(self, seen: ScorerInput, state: State) -> tuple[Tensor, State]:
        """(log of the gate [B, H, S], state as it was): in the gate's order, and told apart where
        it is next to 0."""
        assert seen.inputs is not None
        (h, _, g), d = self.b.shape, len(self.q_norm)
        b, s, _ = seen.inputs.shape
        q = F.rms_norm(self.q_proj(seen.inputs).view(b, s, h, g, d), (d,), self.q_norm, 1e-6)
        k = F.rms_norm(self.k_proj(seen.inputs).view(b, s, h, d), (d,), self.k_norm, 1e-6)
        own = torch.einsum("bshgd,bshd->bshg", q, k) / d**0.5 + self.b[:, 0]
        sinks = torch.einsum("bshgd,hnd->bshgn", q, self.k_base[:, 0]) / d**0.5
        each = F.logsigmoid(own - sinks.logsumexp(dim=-1))
        return each.logsumexp(dim=-1).transpose(1, 2) - math.log(g), state
