"""What a scorer learns: how much attention each key will still get from the queries to come.

    target_t = max over the group of logaddexp(Y_t - log N_t, log eps)

Y_t is the log of the attention that key t gets from all queries d >= t + delay of its document
together, N_t how many there are (KVpop, arXiv 2607.05061). A token without any has N_t = 0 and the
lowest target there is, log eps: finite, so that it can be ranked, and out of every loss.

Two options of ours change what "attention together" is (docs/training.md says what they are worth):
`power` p counts (sum of attention^p)^(1/p), so that one decisive look is not outweighed by many
faint ones, and `per_query=False` leaves N_t out, which favours a document's last tokens.

The shares of attention are of the model's dense pass, or of what a student that evicts would still
attend to: `lse`, dense or sparse. The paper's is sparse, for its model trains under its evictions
too; there a token that is gone competes with those that are held, and its share may be above 1.

N_t falls by one from token to token until the document ends. So the last targets are means over
few queries and mean little, and losses leave out tokens with N_t < `min_future`. Tokens that enter
the top k at earlier queries are all older, with larger N_t: whatever the last targets are, no
boundary before them depends on them.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.kernels.causal import causal_lse
from kvpolicies.kernels.future import future_log_mass
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.retention import document_bounds
from kvpolicies.learned.config import AGGREGATES

EPS = 1e-6


@dataclass(frozen=True)
class Target:
    """Which target, of those above.

    Raises:
        UserError: for a value that cannot be.
    """

    delay: int
    """Queries from so many tokens later on count."""
    aggregate: str = "max"
    """How the group's query heads become one: `max` (the paper's), `mean` or `sum`, of their
    targets, that is of logarithms."""
    power: float = 1.0
    """p >= 1; 1 is the paper's: attention mass."""
    per_query: bool = True
    """Whether the sum over queries becomes a mean; the paper's does."""
    eps: float = EPS
    """The attention that counts as none."""

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            known = ", ".join(AGGREGATES)
            raise UserError(f"targets: aggregate must be one of {known}, got {self.aggregate!r}")
        for name, holds, wanted in (
            ("eps", self.eps > 0, "> 0"),
            ("delay", self.delay >= 0, ">= 0"),
            ("power", 1 <= self.power < math.inf, "at least 1"),
        ):
            if not holds:
                raise UserError(f"targets: {name} must be {wanted}, got {getattr(self, name)!r}")

    @torch.no_grad()
    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        softmax: LogitTransform,
        documents: Tensor | None = None,
        expires: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The targets of one layer's attention.

        Args:
            queries: [B, H, G, S, D], post-RoPE.
            keys: [B, H, S, D].
            documents: [B, S] integer, nondecreasing; None = one a row.
            expires: [B, H, S] int32, a student's eviction times, of which no query may be left
                with nothing: its log-sum-exp is over what it would still hold. None = dense.

        Returns:
            (target [B, H, S] float32, futures [B, S] int32: N_t, 0 = no future). Memory
            O(block * S) a head.
        """
        lse = causal_lse(queries, keys, softmax, documents, expires)
        # attention^p = exp(p logit - p lse), and p logit is the logit of a scale and cap times p.
        p, cap = self.power, softmax.cap
        sharp = replace(softmax, scale=p * softmax.scale, cap=None if cap is None else p * cap)
        return self.of(
            future_log_mass(queries, keys, p * lse, sharp, self.delay, documents), documents
        )

    def of(self, log_mass: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Targets [B, H, G, S] float32: the log of each key's sum of attention^p."""
        futures = future_counts(log_mass[:, 0, 0], self.delay, documents)
        mass = log_mass.float()
        if self.per_query:
            mass = mass - futures.clamp_min(1).float().log()[:, None, None]
        mass = mass / self.power
        each = torch.logaddexp(mass, torch.full_like(mass, math.log(self.eps)))
        if self.aggregate == "max":
            return each.amax(dim=2), futures
        return (each.mean(dim=2) if self.aggregate == "mean" else each.sum(dim=2)), futures


def future_counts(like: Tensor, delay: int, documents: Tensor | None = None) -> Tensor:
    """N_t [B, S] int32: queries of a token's document from `delay` tokens later on.

    Args:
        like: [B, S], any tensor of that shape and device.
        documents: [B, S] integer, nondecreasing; None = one a row.
    """
    at = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
    return (document_bounds(like, documents)[1] - at - delay).clamp_min(0)
