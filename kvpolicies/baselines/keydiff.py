"""keydiff: keys unlike the others stay (arXiv 2504.15364)."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvpolicies.budget import Budget
from kvpolicies.options import option
from kvpolicies.policy import Observation, Policy, Schedule, Scores, View, batched_drop

EPS = 1e-12


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Score = minus the cosine of a key to the mean of the normalised cached keys.

    The mean moves with every token, so all keys are read twice at each eviction, which happens
    every `every` tokens (at most an eighth of the budget at once). One at a time costs more and, on
    ledger traces, keeps less (docs/performance.md): each token then goes by a mean of its own.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "keydiff"
    source = "KeyDiff, arXiv 2504.15364"
    layers_alike = True
    slot_tensors = MappingProxyType({"inverse_norm": torch.float32})
    every: int = option(128, least=1)
    """Tokens between two evictions; at most an eighth of the budget goes at once."""

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Evicts in batches: see `batched_drop`."""
        return Schedule.under(budget, batched_drop(self.every, budget))

    def observe(self, view: View, step: Observation) -> None:
        """A key's norm does not change: it is taken once."""
        slots = view.newest_slots(step.positions.shape[1])
        slots = slots[:, None].expand(*view.keys.shape[:2], -1)
        new = view.keys.gather(2, slots[..., None].expand(*slots.shape, view.keys.shape[3]))
        norm = new.float().norm(dim=-1).clamp_min(EPS)
        view.slot_state["inverse_norm"].scatter_(2, slots, 1 / norm)

    def scores(self, view: View) -> Scores:
        """From the cached post-RoPE keys alone: no queries, no state but their norms."""
        keys, inverse = view.keys.float(), view.slot_state["inverse_norm"]
        mean = inverse[:, :, None] @ keys / keys.shape[2]  # [B, H, 1, D]
        mean = mean / mean.norm(dim=-1, keepdim=True).clamp_min(EPS)
        return -(keys @ mean.mT)[..., 0] * inverse
