"""Layers with a sliding window keep a cache of their own: what their queries can still see.

Such a layer never needs more than its span, whatever the study's budget; evicting there would only
change the model. So hybrid models (Gemma, GPT-OSS) are evicted in their full layers.
"""

from dataclasses import dataclass

from kvpolicies.budget import Budget
from kvpolicies.policy import Policy, Schedule, Scores, View

# Tokens let go at once: freeing one slot a step would be dearer than the slots.
BATCH = 128


def sliding_budget(span: int) -> Budget:
    """A query sees itself and the span - 1 tokens before it; so many more are let go at once."""
    return Budget(span - 1 + min(span, BATCH), sinks=0, window=span - 1)


@dataclass(frozen=True, kw_only=True)
class Sliding(Policy):
    """A sliding-window layer's policy: lets go what no later query sees, and nothing else."""

    name = "sliding"

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """All that is out of sight goes when the layer is full."""
        return Schedule.under(budget, budget.topk)

    def scores(self, view: View) -> Scores:
        """The position itself."""
        return view.positions.float()
