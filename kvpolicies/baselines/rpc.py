"""rpc: attention of the newest queries, one set a layer (Reasoning Path Compression)."""

from dataclasses import dataclass

import torch

from kvpolicies.budget import Budget
from kvpolicies.kernels.observe import observation_scores
from kvpolicies.observation import NewestQueries, average_pool, oldest_of
from kvpolicies.options import option
from kvpolicies.policy import MOST_QUERIES, Schedule, Scores, View, batched_drop
from kvpolicies.transfer import on_device


@dataclass(frozen=True, kw_only=True)
class RPC(NewestQueries):
    """Attention of the newest queries to older keys, averaged over all heads, pooled.

    One kept set a layer. Softmax and pool run over the tokens that may go: those older than the
    observing queries' own, which are kept, and not among the sinks. Every eviction goes down to the
    fixed budget, at most an eighth of it at once.

    `faithful=True` is the paper's rule: the prompt is never evicted, nor scored. Once there are `P`
    new tokens beside the R newest, `P / c` of them stay, and so again every `P` tokens: the cache
    grows, and the budget asked for plays no part.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "rpc"
    source = "RPC, arXiv 2505.13866 (fixed budget)"
    mixes_heads = True
    one_set = True
    observe_window: int = option(32, least=1, most=MOST_QUERIES)
    """Newest queries that look: the paper's R."""
    kernel: int = option(7, least=1, odd=True)
    """Neighbours in position over which scores are averaged; odd."""
    faithful: bool = False
    """The paper's rule: a cache that grows, and a prompt that stays."""
    P: int = option(1024, least=1)
    """Under `faithful`: new tokens between two evictions."""
    c: int = option(4, least=2)
    """Under `faithful`: of `P` new tokens `P / c` stay; at least 2."""

    @property
    def observed(self) -> int:
        """The paper's R."""
        return self.observe_window

    @property
    def own_rule(self) -> bool:
        """The paper's growing cache."""
        return self.faithful

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """Under `faithful=True`: first at P + R new tokens, P / c more each time."""
        if not self.faithful:
            return Schedule.under(budget, batched_drop(self.every, budget), self.observe_window)
        grows, first = self.P // self.c, prompt + self.P + self.observe_window
        evictions = max(0, limit - 1 - self.observe_window) // self.P
        return Schedule(
            capacity=first + evictions * grows,
            drop=self.P - grows,
            sinks=prompt,
            window=self.observe_window,
            prompt_drop=self.P - grows,
            first=first,
            growth=grows,
        )

    def scores(self, view: View) -> Scores:
        """softmax over what may go -> sum over queries -> mean over heads -> average-pool."""
        when, positions = view.state["when"], view.positions
        sinks = on_device([s.sinks for s in view.schedules], positions.device)
        oldest = oldest_of(when)
        goes = (positions < oldest[:, None, None]) & (positions >= sinks[:, None, None])
        # Every query looks from just before the oldest one, and takes what may not go for later.
        before = (oldest[:, None] - 1).expand(when.shape)
        seen = positions.masked_fill(~goes, torch.iinfo(torch.int32).max)
        args = (view.state["queries"], view.keys, before, seen, view.softmax, when > 0)
        mass = observation_scores(*args, pool="sum", per="head").mean(dim=(1, 2))  # slots align
        pooled = average_pool(mass[:, None, None], positions[:, :1], self.kernel)[:, 0]
        return pooled.expand(positions.shape).masked_fill(~goes, float("inf"))
