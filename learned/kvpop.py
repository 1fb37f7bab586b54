"""kvpop: a recurrent scorer reads each token when it leaves the window (KVpop)."""

from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor

from kvpolicies.learned.nets import ScorerInput
from kvpolicies.learned.places import Places, taken
from kvpolicies.learned.policy import Learned
from kvpolicies.learned.scorer import Scorer
from kvpolicies.options import option
from kvpolicies.policy import Observation, View
from kvpolicies.rows import runs
from kvpolicies.transfer import counting


@dataclass(frozen=True, kw_only=True)
class KVpopMLP(Learned):
    """An MLP on each token's own key and value, read as it enters the cache.

    Priority = score + lam times position: static, so one in, one out keeps the top k of all.
    """

    name = "kvpop_mlp"
    source = "KVpop_mlp, arXiv 2607.05061"
    block: int = option(1, least=1)
    """Tokens that the scorer is shown at once: it runs every so many, with the same scores."""

    @property
    def scored_after(self) -> int:
        """The scorer's lag, and what a token at the start of a block waits for its end."""
        return self.config.lag + self.block - 1

    def observe(self, view: View, step: Observation) -> None:
        """Feeds the scorer by whole blocks of positions, each when its last token is there.

        The tokens of a block that is not whole yet lie in the cache: the window protects them.
        """
        if self.block == 1:
            return super().observe(view, step)
        n, m = step.positions.shape[1], self.block
        before = [(seen - n) // m * m for seen in view.seen]
        waiting = [seen // m * m - first for seen, first in zip(view.seen, before, strict=True)]
        for first, last, count in runs(waiting):
            if count:
                rows = slice(first, last)
                at = counting(before[rows], count, view.keys.device)
                self._score(view.of(rows), at)

    @property
    def needs_rope(self) -> bool:  # type: ignore[override]
        """Only scorers of keys before RoPE turn them back."""
        return self.config.features == "pre_rope"

    def _seen(
        self, scorer: Scorer, view: View, written: Tensor, inputs: Tensor | None, places: Places
    ) -> ScorerInput:
        found = (_newest if self.block == 1 else _held)(view, written)
        new = self._features(scorer, view, *found, written)
        if not self.config.lag:
            return ScorerInput(new, new)
        slots = places.slots()
        positions = (written - self.config.lag).clamp_min(0)
        kept = (taken(view.keys, slots), taken(view.values, slots))
        return ScorerInput(new, self._features(scorer, view, *kept, positions))

    def _features(
        self, scorer: Scorer, view: View, keys: Tensor, values: Tensor, positions: Tensor
    ) -> Tensor:
        """[k; v] [B, H, n, 2 D] of tokens at positions [B, n]."""
        if self.needs_rope:
            keys = view.rope.unrotate(keys, positions)
        return scorer.features(keys, values)


@dataclass(frozen=True, kw_only=True)
class KVpop(KVpopMLP):
    """An mLSTM memory, written with every token, tells at the end of the window what to keep.

    Each KV head has a memory of its own. The query that reads it is a projection of the leaving
    token's key and value, so that what came since has its say.
    """

    name = "kvpop"
    source = "KVpop, arXiv 2607.05061"

    @property
    def made_for(self) -> str | None:
        """The model of the scorer (`Learned.made_for`); without xlstm it runs on nothing."""
        return super().made_for if find_spec("xlstm") else ""


def _newest(view: View, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, n, D] of the tokens at positions [B, n], the newest ones."""
    n, last = positions.shape[1], view.lengths[0]
    if all(length == last for length in view.lengths):
        return view.keys[:, :, last - n : last], view.values[:, :, last - n : last]
    return _held(view, positions)


def _held(view: View, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Features of tokens that need not be the newest, wherever they lie."""
    slots = Places(view.positions, positions).slots()
    return taken(view.keys, slots), taken(view.values, slots)
