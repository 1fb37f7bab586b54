"""fastkvzip: low-rank gates hold a token against fixed keys (Fast KVzip, arXiv 2601.17668)."""

from dataclasses import dataclass

import torch

from kvpolicies.learned.policy import Learned


@dataclass(frozen=True, kw_only=True)
class FastKVzip(Learned):
    """Score = log of the gate: the share of attention that a token draws beside sixteen fixed keys.

    The paper shares one budget out over layers and heads; here each head has its own. `kvpolicies
    import fastkvzip` reads the authors' weights.
    """

    name = "fastkvzip"
    source = "Fast KVzip, arXiv 2601.17668"
    needs_input = True
    precision = torch.float64  # as of dms: ties of equal inputs stay ties in any batch
