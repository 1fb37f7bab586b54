"""dms: a linear adapter decides what to evict, one token behind (Dynamic Memory Sparsification)."""

from dataclasses import dataclass

import torch

from kvpolicies.learned.policy import Learned


@dataclass(frozen=True, kw_only=True)
class DMS(Learned):
    """A linear adapter on the attention's input; score = minus the logit of its evicting a token.

    The logit read at token t is about token t - 1. The paper evicts where it is above 0, so that
    heads differ in size; under one fixed budget the highest logits go first.
    """

    name = "dms"
    source = "Dynamic Memory Sparsification, arXiv 2506.05345"
    needs_input = True
    # In the first layer equal tokens have equal inputs, hence equal scores. Rounding differs with
    # the batch: in float64 it is gone before the scores are kept, as float32, and ties stay ties.
    precision = torch.float64
