"""keydiff: keys unlike the others stay (arXiv 2504.15364)."""

from dataclasses import dataclass

import torch.nn.functional as F

from kvpolicies.policy import Policy, Scores, View


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Score = minus the cosine of a key to the mean of the normalised cached keys."""

    name = "keydiff"
    source = "KeyDiff, arXiv 2504.15364"

    def scores(self, view: View) -> Scores:
        """From the cached post-RoPE keys alone: no queries, no state."""
        unit = F.normalize(view.keys.float(), dim=-1)
        return -F.cosine_similarity(unit, unit.mean(dim=2, keepdim=True), dim=-1)
