"""What a scorer is made of: one frozen dataclass, which is the config.json beside its weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kvpolicies.config import from_mapping
from kvpolicies.errors import UserError, nearest, whole
from kvpolicies.files import parse_json
from kvpolicies.learned.kinds import KINDS, Kind

FEATURES = ("post_rope", "pre_rope")
AGGREGATES = ("max", "mean", "sum")
"""How the query heads of a group become one target (targets.py)."""
LSES = ("dense", "sparse")
"""Over which keys a target's attention is a share."""
_BASE = ("architecture", "layers", "heads", "head_dim", "config_hash", "weights")


@dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """Sizes and options of a scorer. Use `config_for` (base.py) to make one for a model.

    Raises:
        UserError: for a value that cannot be.
    """

    kind: str
    """Which policy's: kvpop, kvpop_mlp, dms, trimkv, kvzap or fastkvzip."""
    layers: tuple[int, ...]
    """Layers of the model that are evicted, by index: the full ones."""
    heads: int
    """KV heads, H."""
    head_dim: int
    """D."""
    input_size: int = 0
    """E, the size of the attention's input, for kinds that read it: all but kvpop's."""
    groups: int = 0
    """G, query heads a KV head, which fastkvzip's gates are of."""
    window: int = 256
    """w: kvpop decides about a token when it leaves a window of so many tokens; a budget's window
    may be larger, and not smaller."""
    delay: bool = True
    """kvpop: False reads at entry (an ablation)."""
    memory: int = 0
    """kvpop: M, rows and columns of the mLSTM's memory; 0 = head_dim."""
    hidden: int = 0
    """Hidden units: of kvpop_mlp a head, 0 = 2 D; of trimkv a layer, 0 = 512; of kvzap, 0 = a
    linear map. The rank of fastkvzip's gates, 0 = 16."""
    features: str = "post_rope"
    """Keys as kvpop and kvpop_mlp see them: as cached, or turned back ("pre_rope")."""
    decay: bool = True
    """kvpop and kvpop_mlp: priorities fall with age, at a learned rate a head."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """The model that it was trained for (see `fingerprint`); empty = none: no policy takes it."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"scorer: kind {self.kind!r}: {nearest(self.kind, list(KINDS))}")
        if self.features not in FEATURES:
            raise UserError(
                f"scorer: features must be {' or '.join(FEATURES)}, got {self.features!r}"
            )
        for name in ("memory", "hidden"):
            size = getattr(self._kind, name)
            value = getattr(self, name) or (size(self.head_dim) if size else 0)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "layers", tuple(self.layers))
        for name in ("heads", "head_dim"):
            whole(getattr(self, name), 1, f"scorer: {name}", 1 << 20)
        for name in ("memory", "hidden", "window"):
            whole(getattr(self, name), 0, f"scorer: {name}", 1 << 20)
        whole(self.input_size, 1 if self.needs_input else 0, "scorer: input_size", 1 << 20)
        least = int(self._kind.needs_groups)
        whole(self.groups, least, "scorer: groups", 1 << 10)
        for layer in self.layers:
            whole(layer, 0, "scorer: layers", 1 << 20)
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise UserError(f"scorer: layers must be distinct, at least one, got {self.layers}")
        # Older versions did not say which weights.
        if self.base and sorted({*self.base, "weights"}) != sorted(_BASE):
            raise UserError(f"scorer: base must name {', '.join(_BASE)}, got {sorted(self.base)}")

    @property
    def _kind(self) -> Kind:
        return KINDS[self.kind]

    @property
    def needs_input(self) -> bool:
        """Whether the scorer reads the attention's input instead of keys and values."""
        return self._kind.needs_input

    @property
    def ages(self) -> bool:
        """Whether a learned age decay belongs to it."""
        return self.decay and not self.needs_input

    @property
    def lag(self) -> int:
        """Tokens after which a token is scored: its score is read when token t + lag is there."""
        return self._kind.lag(self)

    @property
    def state_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what is carried along a sequence, float32, all zero when it begins."""
        return self._kind.state_shapes(self)

    def to_json(self) -> str:
        """Text that `read_config` reads back to an equal config."""
        return json.dumps({**asdict(self), "base": dict(self.base)}, indent=2) + "\n"


def read_config(text: str, where: str) -> ScorerConfig:
    """A config from JSON.

    Raises:
        UserError: for text that is none, an unknown key or an impossible value; names `where`.
    """
    values = parse_json(text, where)
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected keys and values, got {type(values).__name__}")
    needed = [f.name for f in fields(ScorerConfig)][:4]
    if missing := [name for name in needed if name not in values]:
        raise UserError(f"{where}: {', '.join(missing)} missing; is it a scorer's config?")
    base = values.pop("base", {})
    config = from_mapping(ScorerConfig, values, where)
    if not isinstance(base, dict):
        raise UserError(f"{where}: base must be keys and values, got {base!r}")
    try:
        return replace(config, base=base)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
