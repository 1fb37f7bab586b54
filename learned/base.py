"""Which model a scorer belongs to: the fingerprint that it carries, and the check of it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvpolicies.architecture import inspect_model
from kvpolicies.errors import UserError
from kvpolicies.learned.config import ScorerConfig

# What decides a model's keys, values and layer inputs, its weights aside; neither paths nor dtype
# nor transformers' version.
RELEVANT = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_parameters",
)


def fingerprint(model: Any) -> dict[str, Any]:
    """The model's architecture, layers, KV heads, head_dim, and a sha256 of its config.

    It does not look at weights: fine-tuned copies of a model have the same.

    Raises:
        UserError: if the model is not supported.
    """
    shape = inspect_model(model)
    config = model.config.get_text_config(decoder=True)
    values = {name: _plain(getattr(config, name, None)) for name in RELEVANT}
    text = json.dumps([values, shape.head_dim, shape.spans], sort_keys=True)
    return {
        "architecture": type(model).__name__,
        "layers": shape.layers,
        "heads": shape.heads,
        "head_dim": shape.head_dim,
        "config_hash": hashlib.sha256(text.encode()).hexdigest(),
    }


def config_for(model: Any, kind: str, **options: Any) -> ScorerConfig:
    """The config of a scorer for this model: sizes, evicted layers and fingerprint are the model's.

    Raises:
        UserError: if the model is not supported, or for an option that cannot be.
    """
    shape = inspect_model(model)
    return ScorerConfig(
        kind=kind,
        layers=tuple(i for i, span in enumerate(shape.spans) if span is None),
        heads=shape.heads,
        head_dim=shape.head_dim,
        input_size=model.config.get_text_config(decoder=True).hidden_size,
        base=fingerprint(model),
        **options,
    )


def check_base(config: ScorerConfig, model: Any, where: str = "scorer") -> None:
    """Raises UserError, naming both, if the scorer was made for another model than this."""
    own = fingerprint(model)
    if dict(config.base) != own:
        raise UserError(
            f"{where}: its scorer was trained for {_described(config.base)}; "
            f"the model is {_described(own)}"
        )
    full = [i for i, span in enumerate(inspect_model(model).spans) if span is None]
    if list(config.layers) != full:
        raise UserError(
            f"{where}: its scorer covers layers {list(config.layers)}, the model evicts {full}"
        )


def _described(base: Mapping[str, Any]) -> str:
    if not base:
        return "no model"
    return (
        f"{base['architecture']} of {base['layers']} layers and {base['heads']} KV heads of "
        f"{base['head_dim']} (config {str(base['config_hash'])[:8]})"
    )


def _plain(value: Any) -> Any:
    """Numbers as floats, and nothing that is None: spelt the same by any release."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number else value if value is None else str(value)
