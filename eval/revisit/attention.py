"""One layer's attention, read block by block of queries: far or near, at what, and what was lost.

A block's weights [G, BLOCK, S] of one KV head are the most that is held, so that memory is
O(BLOCK * S) whatever the trace (scripts/revisit_memory.py measures it). Weights are those of the
full cache; a policy's eviction times say which of them it could no longer have given.

Shapes: H KV heads, G query heads per KV head, S tokens, N queries of new tokens (positions
S - N .. S - 1), D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpolicies.eval.revisit.config import Rule
from kvpolicies.kernels.causal import grouped_logits
from kvpolicies.kernels.logit_transform import LogitTransform

# Queries handled at once.
BLOCK = 64
_DOUBLE = torch.float64
# Distances 0, 1, 2-3, 4-7, ... up to 2 ** 23 - 1; the last place is the sinks'.
BINS = 25
LOCAL, GLOBAL = 0, 1
# What is counted, and how much of it a policy has lost: in this order.
LOSSES = ("revisits", "mass", "far", "all")
NEEDED = 0.95
"""Of a query's attention: a layer needs as many keys as hold so much."""


@dataclass(frozen=True)
class LayerFigures:
    """What one layer's attention comes to; sums are float64, on the CPU."""

    by_definition: Tensor
    """[2, H, G, N] bool: the query is global by the top-k definition, by the weighted one."""
    is_global: Tensor
    """[H, G, N] bool: by the rule's own definition."""
    histogram: Tensor
    """[2, BINS] attention mass of local and of global queries, by distance."""
    received: Tensor
    """[S] attention mass from queries further than the rule's distance behind."""
    revisits: Tensor
    """[S] revisits: pairs of a global query and a far key among its K most attended."""
    totals: Tensor
    """[4] as LOSSES: revisits; their mass; all mass given to far keys; all mass."""
    lost: Tensor
    """[cells, 4] of it, what went to keys that were evicted by then."""
    needs: Tensor
    """[1] keys that hold `NEEDED` of a query's attention, summed over all its queries; 0 where they
    are not counted."""


@torch.no_grad()
def look(
    queries: Tensor,
    keys: Tensor,
    softmax: LogitTransform,
    first: int,
    rule: Rule,
    times: Sequence[Tensor],
    needs: bool = False,
) -> LayerFigures:
    """Reads one layer's attention of one sequence.

    Args:
        queries: [H, G, S, D], post-RoPE.
        keys: [H, S, D], post-RoPE.
        first: position of the first query that counts, S - N.
        times: eviction times [H, S] int32 at this layer, one a policy and budget.
        needs: count the keys that a query needs.
    """
    heads = []
    for h in range(keys.shape[0]):
        sink = None if softmax.sink is None else softmax.sink[h : h + 1]
        own = replace(softmax, sink=sink)
        gone = [e[h].to(keys.device) for e in times]
        heads.append(_look_at_head(queries[h], keys[h], own, first, rule, gone, needs))
    by_definition = torch.stack([head.by_definition for head in heads], dim=1)
    sums = [[getattr(head, name) for head in heads] for name in _SUMS]
    own = torch.stack([head.is_global for head in heads])
    return LayerFigures(by_definition, own, *(torch.stack(parts).sum(0) for parts in sums))


_SUMS = ("histogram", "received", "revisits", "totals", "lost", "needs")


def _look_at_head(
    queries: Tensor,
    keys: Tensor,
    softmax: LogitTransform,
    first: int,
    rule: Rule,
    times: list[Tensor],
    needs: bool,
) -> LayerFigures:
    length = keys.shape[0]
    double = {"dtype": _DOUBLE, "device": keys.device}
    histogram, received = torch.zeros(2, BINS, **double), torch.zeros(length, **double)
    revisits, totals = torch.zeros(length, **double), torch.zeros(4, **double)
    lost, classes = torch.zeros(len(times), 4, **double), []
    needed = torch.zeros(1, **double)
    # The widest first: what it gives back holds all others, while blocks that widen would each ask
    # the allocator for more.
    for begin in reversed(range(first, length, BLOCK)):
        end = min(begin + BLOCK, length)
        block = _Block.of(queries[:, begin:end], keys[:end], softmax, begin, rule)
        classes.append(block.by_definition)
        histogram += block.histogram()
        pairs = block.pairs()  # [4, n, L]
        totals += pairs.sum((1, 2), dtype=_DOUBLE)
        revisits[:end] += pairs[0].sum(0, dtype=_DOUBLE)
        received[:end] += pairs[2].sum(0, dtype=_DOUBLE)
        if needs:
            needed += block.needed()
        for cell, e in enumerate(times):
            evicted = e[:end] <= block.positions[:, None]
            lost[cell] += (pairs * evicted).sum((1, 2), dtype=_DOUBLE)
    both = torch.cat(classes[::-1], dim=-1).cpu()
    chosen = both[0 if rule.definition == "top-k" else 1]
    rest = (x.cpu() for x in (histogram, received, revisits, totals, lost, needed))
    return LayerFigures(both, chosen, *rest)


@dataclass(frozen=True)
class _Block:
    """n queries of one KV head, positions begin .. begin + n - 1, against L = begin + n keys."""

    positions: Tensor  # [n]
    distances: Tensor  # [n, L]; negative = not yet there
    weights: Tensor  # [G, n, L] float32, zero where not seen
    among: Tensor  # [G, n, L] bool: one of the K most attended
    by_definition: Tensor  # [2, G, n] bool
    rule: Rule

    @classmethod
    def of(
        cls, queries: Tensor, keys: Tensor, softmax: LogitTransform, begin: int, rule: Rule
    ) -> "_Block":
        length = keys.shape[0]
        logits = grouped_logits(queries[None, None], keys[None, None], softmax)
        q = torch.arange(begin, length, device=keys.device)
        t = torch.arange(length, device=keys.device)
        distances = q[:, None] - t
        logits = logits.masked_fill(distances < 0, float("-inf"))
        weights = softmax.weights(logits)[0, 0]
        among = largest(logits[0, 0].masked_fill(t < rule.sinks, float("-inf")), rule.k)
        near = weights[..., rule.sinks :]
        means = torch.stack(
            [
                (among * distances).sum(-1) / among.sum(-1).clamp_min(1),
                (near * distances[:, rule.sinks :]).sum(-1) / near.sum(-1).clamp_min(1e-30),
            ]
        )
        return cls(q, distances, weights, among, means > rule.distance, rule)

    @property
    def is_global(self) -> Tensor:
        return self.by_definition[0 if self.rule.definition == "top-k" else 1]

    def far(self) -> Tensor:
        """[n, L] bool: further away than the rule's distance, and no sink."""
        far = self.distances > self.rule.distance
        far[:, : self.rule.sinks] = False
        return far

    def pairs(self) -> Tensor:
        """[4, n, L] float32, as LOSSES, summed over the group: counts first, then masses."""
        far = self.far()
        revisits = self.among & far & self.is_global[..., None]
        mass = (self.weights * revisits).sum(0)
        whole = self.weights.sum(0)
        return torch.stack([revisits.sum(0).float(), mass, whole * far, whole])

    def needed(self) -> Tensor:
        """Keys that hold `NEEDED` of a query's attention (to keys), the fewest, summed."""
        held = self.weights.sort(dim=-1, descending=True).values.cumsum(-1)
        return (held < NEEDED * held[..., -1:]).sum(-1).add(1).sum()

    def histogram(self) -> Tensor:
        """[2, BINS] float64."""
        edges = 2 ** torch.arange(BINS - 2, device=self.distances.device)
        places = torch.bucketize(self.distances.clamp_min(0), edges, right=True)
        places[:, : self.rule.sinks] = BINS - 1
        out = []
        for chosen in (~self.is_global, self.is_global):
            mass = (self.weights * chosen[..., None]).sum(0, dtype=_DOUBLE)
            out.append(torch.bincount(places.flatten(), mass.flatten(), BINS))
        return torch.stack(out)


def largest(logits: Tensor, k: int) -> Tensor:
    """[..., L] bool: the k largest of each row, fewer where fewer are above -inf.

    Of equals the later one wins. One topk of values and comparisons: no sort, no indices.
    """
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    above = logits > least
    equal = (logits == least) & (least > float("-inf"))
    wanted = k - above.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > wanted).any()):
        after = equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
        equal &= after <= wanted
    return above | equal


def bounds(place: int) -> tuple[int, int]:
    """The least and the largest distance of a place of the histogram, the sinks' excepted."""
    return (0, 0) if place == 0 else (2 ** (place - 1), 2**place - 1)
