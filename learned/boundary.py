"""The boundary loss: at each query, does the token that leaves the window stay, or the incumbent?

At query q token t_new = q - window enters, and t_bnd is the teacher's topk-th best of those before
it: one of the two goes. The student is asked about these pairs only, that is about the decisions
that a cache really takes (KVpop, arXiv 2607.05061):

    loss = sum of w * softplus(-y * (r_new - r_bnd + decay * (t_new - t_bnd)) / tau) / sum of w

y = +1 iff the teacher's priority of t_new is the higher one. Priorities are static: score + decay *
position, with a decay per head that the student learns; the teacher uses it without gradient. The
teacher's own targets need no care near a document's end: a pair with a short future is left out,
and no pair that stays depends on one (see targets.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.kernels.retention import document_bounds, retain

MIN_FUTURE = 64
"""Targets that are means over fewer queries are left out of losses and measures."""


@dataclass(frozen=True)
class Loss:
    """The boundary loss of one layer."""

    loss: Tensor
    """[], with gradient; 0 without any pair."""
    accuracy: Tensor
    """[], share of pairs that the student decides as the teacher does, keep and drop counting the
    same, so that 0.5 is chance; NaN without any pair. No gradient."""
    pairs: Tensor
    """[] int64, how many pairs of all heads and rows there are."""


def static_priorities(
    scores: Tensor, decay: Tensor | None, documents: Tensor | None = None
) -> Tensor:
    """score + decay * position: what never changes as tokens age.

    Args:
        scores: [B, H, S].
        decay: [H] >= 0, per token; None = 0.
        documents: [B, S] integer, nondecreasing; positions count from 0 in each. None = one a row.

    Returns:
        [B, H, S] float32, float64 if the scores are.
    """
    scores = _exact(scores)
    if decay is None:
        return scores
    at = torch.arange(scores.shape[-1], device=scores.device)
    if documents is not None:
        at = (at - document_bounds(scores[:, 0], documents)[0])[:, None]
    return scores + decay.to(scores.dtype)[:, None] * at


def _exact(scores: Tensor) -> Tensor:
    """In 16 bits most differences are gone."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def retained(
    priorities: Tensor, sinks: int, window: int, topk: int, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`retain` of all rows and heads: (boundary, expires), each [B, H, S] int32, of [B, H, S]."""
    if documents is not None:
        documents = documents[:, None].expand(priorities.shape).flatten(0, 1)
    rows = priorities.detach().flatten(0, 1)
    boundary, expires = retain(rows, sinks, window, topk, documents)
    return boundary.view(priorities.shape), expires.view(priorities.shape)


def boundary_loss(
    scores: Tensor,
    targets: Tensor,
    decay: Tensor | None,
    sinks: int,
    window: int,
    topk: int,
    futures: Tensor,
    min_future: int = MIN_FUTURE,
    tau: float = 1.0,
    documents: Tensor | None = None,
    margin: bool = False,
) -> Loss:
    """The loss of one layer's scores.

    In each head pairs to keep and pairs to drop weigh the same in sum, and so do heads.

    Args:
        scores: [B, H, S], the student's, of any float type.
        targets: [B, H, S], of `Target.of`.
        futures: [B, S], of `future_counts`.
        decay: [H] >= 0, learned; None = 0.
        sinks: first tokens that a head keeps.
        window: newest tokens that it keeps.
        topk: tokens that it holds beside these.
        min_future: pairs of which a token has fewer later queries leave the loss; at least 1.
        tau: temperature of the student's differences.
        documents: [B, S] integer, nondecreasing; None = one a row.
        margin: a pair weighs as much as the teacher's two priorities differ.

    Returns:
        loss, accuracy and number of pairs. No pair, as in sequences that the budget holds whole: 0.

    Raises:
        ValueError: for tau <= 0, min_future < 1, or targets that are NaN.
    """
    if not tau > 0:
        raise UserError(f"boundary loss: tau must be > 0, got {tau!r}")
    scores, targets = _exact(scores), targets.detach()
    teacher = static_priorities(targets, None if decay is None else decay.detach(), documents)
    boundary = retained(teacher, sinks, window, topk, documents)[0]
    asked = _long_future(futures, min_future)[:, None] & targets.isfinite()
    old = boundary.long().clamp_min(0)
    new = (torch.arange(scores.shape[-1], device=scores.device) - window).clamp_min(0)
    pairs = (boundary >= 0) & asked[..., new] & asked.gather(-1, old)
    # A pair that is left out gives no gradient, not even NaN where nothing was scored.
    ahead = (scores[..., new] - scores.gather(-1, old)).masked_fill(~pairs, 0)
    if decay is not None:
        ahead = ahead + decay.to(scores.dtype)[:, None] * ((new - old) * pairs)
    better = (teacher[..., new] - teacher.gather(-1, old)).masked_fill(~pairs, 0)
    keep = better > 0
    classes = (pairs & keep, pairs & ~keep)
    weights = _balanced(classes, better.abs() if margin else pairs.to(better.dtype))
    each = torch.nn.functional.softplus(torch.where(keep, -ahead, ahead) / tau)
    # Without any pair all weights are 0: so is the loss, and it still has a graph.
    loss = (weights.to(each.dtype) * each).sum() / weights.sum().clamp_min(1e-30).to(each.dtype)
    right = _balanced(classes, pairs.float())
    return Loss(loss, (right * ((ahead > 0) == keep)).sum() / right.sum(), pairs.sum())


def _balanced(classes: tuple[Tensor, Tensor], weights: Tensor) -> Tensor:
    """Weights [B, H, S] scaled so that each class of each head sums to the same; a head to 1."""
    sums = [(weights * its).sum(dim=(0, 2), keepdim=True) for its in classes]
    there = sum((x > 0).to(weights.dtype) for x in sums)
    scaled = [
        weights * its / torch.where(x > 0, x * there, 1)
        for its, x in zip(classes, sums, strict=True)
    ]
    return scaled[0] + scaled[1]


def regression_loss(
    scores: Tensor, targets: Tensor, futures: Tensor, min_future: int = MIN_FUTURE
) -> Tensor:
    """Mean squared error of scores [B, H, S] to targets, over tokens with a long enough future.

    Returns:
        [], 0 with a gradient graph where there is no such token.

    Raises:
        ValueError: for min_future < 1.
    """
    there = _long_future(futures, min_future)[:, None] & targets.isfinite()
    error = (_exact(scores) - targets).masked_fill(~there, 0).square().sum()
    return error / there.sum().clamp_min(1)


def _long_future(futures: Tensor, min_future: int) -> Tensor:
    """[B, S] bool."""
    if min_future < 1:
        raise UserError(f"min_future must be at least 1, got {min_future!r}: 0 has no target")
    return futures >= min_future


@torch.no_grad()
def recall(
    priorities: Tensor,
    teacher: Tensor,
    sinks: int,
    window: int,
    topk: int,
    documents: Tensor | None = None,
    min_future: int = MIN_FUTURE,
    at: str = "every",
) -> Tensor:
    """Share of the teacher's topk kept tokens that the student keeps too, per head.

    Both evict one token a query, each by its own static priorities [B, H, S]. Queries count at
    which something had to go, and whose entering token has at least `min_future` later queries:
    kept sets after that would be judged by targets that mean little.

    Args:
        at: `every` such query, or `ends`, the last of each document.

    Returns:
        [H] float32; NaN where no query counts. Chance is topk / eligible tokens. O(S) a head.

    Raises:
        ValueError: for another `at`.
    """
    if at not in ("every", "ends"):
        raise UserError(f"recall: at must be 'every' or 'ends', got {at!r}")
    boundary, expires = retained(teacher, sinks, window, topk, documents)
    expires = torch.minimum(expires, retained(priorities, sinks, window, topk, documents)[1])
    first, last = (x[:, None].long() for x in document_bounds(teacher[:, 0], documents))
    s = teacher.shape[-1]
    q = torch.arange(s, device=teacher.device)
    # Token t is kept by both at queries t + window .. expires - 1: one up there, one down behind.
    enters = q + window
    leaves = torch.minimum(expires.long(), last)
    ever = (q >= first + sinks) & (enters < leaves)
    changes = torch.zeros(*teacher.shape[:2], s + 1, device=teacher.device)
    changes.scatter_add_(-1, enters.clamp_max(s).expand_as(leaves), ever.float())
    changes.scatter_add_(-1, leaves, -ever.float())
    both = changes[..., :s].double().cumsum(dim=-1)
    counted = (boundary >= 0) & (q + min_future <= last)
    if at == "ends":
        counted = counted & (q + min_future == last)
    return ((both * counted).sum(dim=(0, 2)) / (counted.sum(dim=(0, 2)) * topk)).float()


@torch.no_grad()
def spearman(
    scores: Tensor,
    targets: Tensor,
    futures: Tensor,
    documents: Tensor | None = None,
    min_future: int = MIN_FUTURE,
) -> Tensor:
    """Rank correlation of scores and targets [B, H, S], per head.

    Over the tokens of a document with a long enough future, ties with their mean rank; documents
    count by their number of tokens. A constant side correlates 0.

    Returns:
        [H] float64; NaN where no document has two such tokens.
    """
    there = _long_future(futures, min_future)
    first = document_bounds(futures, documents)[0]
    total = torch.zeros(scores.shape[1], dtype=torch.float64, device=scores.device)
    tokens = 0
    for row in range(scores.shape[0]):
        for start in first[row].unique().tolist():
            its = there[row] & (first[row] == start)
            n = int(its.sum())
            if n > 1:
                a, b = (_ranks(x[row][:, its]) for x in (scores, targets))
                size = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
                total += n * torch.where(size > 0, (a * b).sum(-1) / size.clamp_min(1e-30), 0)
                tokens += n
    return total / (tokens or float("nan"))


def _ranks(x: Tensor) -> Tensor:
    """[H, n] -> ranks minus their mean, float64; of equal numbers the mean of their ranks."""
    x = x.double().contiguous()
    ordered = x.sort(dim=-1).values
    below = torch.searchsorted(ordered, x)
    upto = torch.searchsorted(ordered, x, right=True)
    return (below + upto - 1).double() / 2 - (x.shape[-1] - 1) / 2
