"""kvpop: a recurrent scorer reads each token when it leaves the window (KVpop)."""

from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor

from kvpolicies.learned.nets import Seen
from kvpolicies.learned.places import Places, taken
from kvpolicies.learned.policy import Learned
from kvpolicies.learned.scorer import Scorer
from kvpolicies.policy import Step, View


@dataclass(frozen=True, kw_only=True)
class KVpopMLP(Learned):
    """An MLP on each token's own key and value, read as it enters the cache.

    Priority = score + lam times position: static, so one in, one out keeps the top k of all.
    """

    name = "kvpop_mlp"
    source = "KVpop_mlp, arXiv 2607.05061"

    @property
    def needs_rope(self) -> bool:  # type: ignore[override]
        """Only scorers of keys before RoPE turn them back."""
        return self.config.features == "pre_rope"

    def _seen(self, scorer: Scorer, view: View, step: Step, places: Places) -> Seen:
        new = self._features(scorer, view, *_newest(view, step), step.positions)
        if not self.config.lag:
            return Seen(new, new)
        slots = places.slots()
        positions = (step.positions - self.config.lag).clamp_min(0)
        kept = (taken(view.keys, slots), taken(view.values, slots))
        return Seen(new, self._features(scorer, view, *kept, positions))

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
        """See `Learned`; without xlstm it runs on nothing."""
        return super().made_for if find_spec("xlstm") else ""


def _newest(view: View, step: Step) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, n, D] of the step's tokens."""
    n, last = step.positions.shape[1], view.lengths[0]
    if all(length == last for length in view.lengths):
        return view.keys[:, :, last - n : last], view.values[:, :, last - n : last]
    slots = Places(view.positions, step.positions).slots()
    return taken(view.keys, slots), taken(view.values, slots)
