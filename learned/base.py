"""Which model a scorer belongs to: the fingerprint that it carries, and the check of it.

A fingerprint holds a hash of what the config decides, and a sample of every tensor before the
output head. A sample is compared, not hashed, within what rounding to 16 bits may change: so it is
the same model in float32, bfloat16 and float16, on any device, in one piece or in parts.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpolicies.architecture import inspect_model
from kvpolicies.errors import UserError
from kvpolicies.learned import saving
from kvpolicies.learned.config import KINDS, ScorerConfig

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
    """The model's architecture, layers, KV heads, head_dim, a sha256 of its config, and `weights`.

    `weights` is "" of a model without storage (torch's meta device).

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
        "weights": sampled(relevant(model).values()),
    }


def relevant(model: Any) -> dict[str, Tensor]:
    """The parameters that decide keys, values and layer inputs, by name, in order of names."""
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    left_out = {id(p) for p in head.parameters()} if head is not None else set()
    left_out -= {id(p) for p in words.parameters()}  # tied
    return {k: p for k, p in sorted(model.named_parameters()) if id(p) not in left_out}


def sampled(weights: Iterable[Tensor]) -> str:
    """SAMPLE evenly spread numbers of each tensor, bfloat16 in base64; "" without storage."""
    rows = []
    for weight in weights:
        if weight.is_meta:
            return ""
        whole = getattr(weight, "full_tensor", lambda w=weight: w)().detach()  # of all its parts
        places = (2 * torch.arange(SAMPLE) + 1) * whole.numel() // (2 * SAMPLE)
        rows.append(whole.reshape(-1)[places.to(whole.device)].to("cpu", torch.bfloat16))
    return base64.b64encode(torch.stack(rows).view(torch.uint8).numpy().tobytes()).decode()


SAMPLE = 8
"""Numbers of each tensor in a fingerprint."""
ROUNDING = 2**-7
"""How far numbers may differ, as a share: a step of bfloat16, to which one was rounded through
float16 and the other at once."""
TINY = 1e-7
"""And at least: float16 has no finer numbers near 0."""


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
        groups=shape.groups if kind in KINDS and KINDS[kind].needs_groups else 0,
        base=fingerprint(model),
        **options,
    )


class Made(Protocol):
    """Something that was made for one model."""

    @property
    def base(self) -> Mapping[str, Any]:
        """The model's fingerprint."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model that are evicted, by index."""
        ...


def check_base(made: Made, model: Any, where: str = "scorer", what: str = "scorer") -> None:
    """Raises UserError, naming both, if a scorer, or `what` it is, was made for another model."""
    own, base = fingerprint(model), dict(made.base)
    weights = {"weights": ""}
    if {**base, **weights} != {**own, **weights}:
        raise UserError(
            f"{where}: its {what} was made for {_described(base)}; the model is {_described(own)}"
        )
    if "weights" not in base:
        raise UserError(
            f"{where}: its {what} does not say which weights it was made for, as older versions "
            "wrote it: give its training command again, which adds them (or see "
            "kvpolicies.learned.base.bind)"
        )
    if own["weights"]:  # none where only sizes are asked for
        _check_weights(
            base["weights"], own["weights"], list(relevant(model)), f"{where}: its {what}"
        )
    full = [i for i, span in enumerate(inspect_model(model).spans) if span is None]
    if list(made.layers) != full:
        raise UserError(
            f"{where}: its {what} covers layers {list(made.layers)}, the model evicts {full}"
        )


def _check_weights(stored: Any, own: str, names: Sequence[str], who: str) -> None:
    try:
        before, now = (_numbers(text, len(names)) for text in (stored, own))
    except (ValueError, TypeError, RuntimeError):
        raise UserError(f"{who}'s base holds no sample of this model") from None
    equal = (now - before).abs() <= ROUNDING * before.abs() + TINY
    if other := [name for name, row in zip(names, equal, strict=True) if not bool(row.all())]:
        raise UserError(
            f"{who} was made for a model of this config with other weights: "
            f"{len(other)} of {len(names)} tensors differ, {other[0]} for one"
        )


def _numbers(text: str, tensors: int) -> Tensor:
    """[tensors, SAMPLE] float32, of what `sampled` wrote."""
    data = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(data, dtype=torch.bfloat16).view(tensors, SAMPLE).float()


def bind(folder: str | Path, model: Any) -> None:
    """Binds a scorer of an older version to the weights of the model that it was trained for.

    Raises:
        UserError: if there is no scorer in `folder`, or its config is of another model.
    """
    config = saving.config_in(Path(folder))
    bound = replace(config, base=fingerprint(model))
    check_base(replace(config, base={**config.base, "weights": bound.base["weights"]}), model)
    saving.write_config(Path(folder), bound)


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
