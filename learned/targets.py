"""What a scorer learns: how much attention each key will still get, on average over later queries.

    target_t = max over the group of logaddexp(Y_t - log N_t, log eps)

Y_t is the log of the attention that key t gets from all queries d >= t + delay of its document
together, N_t how many there are (KVpop, arXiv 2607.05061). A token without any has N_t = 0 and the
lowest target there is, log eps: finite, so that it can be ranked, and out of every loss.

N_t falls by one from token to token until the document ends. So the last targets are means over
few queries and mean little, and losses leave out tokens with N_t < `min_future`. Tokens that enter
the top k at earlier queries are all older, with larger N_t: whatever the last targets are, no
boundary before them depends on them.
"""

import math

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.kernels.causal import causal_lse
from kvpolicies.kernels.future import future_log_mass
from kvpolicies.kernels.retention import document_bounds
from kvpolicies.kernels.softmax import Softmax

AGGREGATES = ("max", "mean", "sum")
EPS = 1e-6


def future_targets(
    log_mass: Tensor,
    delay: int,
    documents: Tensor | None = None,
    aggregate: str = "max",
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """Targets of one layer from its future attention mass.

    Args:
        log_mass: [B, H, G, S] float32, Y of `future_log_mass` with the same delay and documents.
        delay: queries from so many tokens later on count.
        documents: [B, S] integer, nondecreasing; None = one a row.
        aggregate: how the group's query heads become one: `max` (the paper's), `mean` or `sum`, of
            their targets, that is of logarithms.
        eps: the mean attention that counts as none.

    Returns:
        (target [B, H, S] float32, futures [B, S] int32: N_t, 0 = no future).

    Raises:
        ValueError: for another aggregate, eps <= 0, or a negative delay.
    """
    if aggregate not in AGGREGATES:
        known = ", ".join(AGGREGATES)
        raise UserError(f"targets: aggregate must be one of {known}, got {aggregate!r}")
    if not eps > 0 or delay < 0:
        raise UserError(f"targets: eps must be > 0 and delay >= 0, got {eps!r}, {delay!r}")
    futures = future_counts(log_mass[:, 0, 0], delay, documents)
    counted = futures.clamp_min(1).float().log()[:, None, None]
    floor = torch.full_like(counted, math.log(eps))
    each = torch.logaddexp(log_mass.float() - counted, floor)
    if aggregate == "max":
        return each.amax(dim=2), futures
    return (each.mean(dim=2) if aggregate == "mean" else each.sum(dim=2)), futures


def future_counts(like: Tensor, delay: int, documents: Tensor | None = None) -> Tensor:
    """N_t [B, S] int32: queries of a token's document from `delay` tokens later on.

    Args:
        like: [B, S], any tensor of that shape and device.
        documents: [B, S] integer, nondecreasing; None = one a row.
    """
    at = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
    return (document_bounds(like, documents)[1] - at - delay).clamp_min(0)


@torch.no_grad()
def targets_of(
    queries: Tensor,
    keys: Tensor,
    softmax: Softmax,
    window: int,
    documents: Tensor | None = None,
    aggregate: str = "max",
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """`future_targets` of one layer's dense attention, the delay being the window.

    Args:
        queries: [B, H, G, S, D], post-RoPE.
        keys: [B, H, S, D].
        window: w >= 1, tokens that are kept whatever their score.
        documents, aggregate, eps: as there.

    Returns:
        (target [B, H, S] float32, futures [B, S] int32). Memory O(block * S) a head.
    """
    lse = causal_lse(queries, keys, softmax, documents)
    mass = future_log_mass(queries, keys, lse, softmax, window, documents)
    return future_targets(mass, window, documents, aggregate, eps)
