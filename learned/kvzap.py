"""kvzap: a small map of the attention's input guesses what KVzip would keep (arXiv 2601.07891)."""

from dataclasses import dataclass

import torch

from kvpolicies.learned.policy import Learned


@dataclass(frozen=True, kw_only=True)
class KVzap(Learned):
    """Score = the guessed log of KVzip's score, taken once as a token enters.

    The paper evicts what is below a threshold, to no fixed size, and keeps 128 newest tokens; under
    one fixed budget the lowest go first. `kvpolicies import kvzap` reads the authors' weights.
    """

    name = "kvzap"
    source = "KVzap, arXiv 2601.07891"
    needs_input = True
    precision = torch.float64  # as of dms: ties of equal inputs stay ties in any batch
