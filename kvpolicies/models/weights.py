"""A checkpoint's weights, whole: what is missing, surplus or not finite is refused by name.

transformers fills a tensor that a checkpoint lacks with random numbers, leaves out one that the
model has no place for, and says so in a table. Here either is one line, and nothing runs.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicies.errors import UserError

NAMED = 3
"""Tensors that a message names at most."""
LONGEST = 200
"""Characters of another library's error that are shown."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers reports in many lines: whole configs, a table of tensors."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def pretrained(kind: Any, where: str | Path, **options: Any) -> Any:
    """`kind.from_pretrained(where, **options)`, every parameter from the checkpoint.

    Args:
        kind: a transformers class of causal language models.

    Raises:
        UserError: for a checkpoint that lacks tensors of the model, holds them in other shapes, or
            holds more of its decoder layers than its config has.
    """
    with quiet():
        model, found = kind.from_pretrained(
            where, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"its checkpoint lacks {_named(missing)}")
    if other := sorted(str(key[0]) for key in found["mismatched_keys"]):
        raise UserError(f"its checkpoint holds {_named(other)} in other shapes than its config has")
    layers = {_stem(name) for name, _ in model.named_parameters()} - {None}
    if surplus := sorted(key for key in found["unexpected_keys"] if _stem(key) in layers):
        raise UserError(f"its config has no place for {_named(surplus)} of its checkpoint")
    return model


def check_finite(model: Any) -> None:
    """Raises UserError, naming it, if a tensor of the model holds NaN or infinity."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        own = getattr(tensor, "to_local", lambda t=tensor: t)()  # of this process, where spread
        if own.is_floating_point() and own.dtype.itemsize > 1 and not bool(own.isfinite().all()):
            wider = "; try --dtype bfloat16" if own.dtype == torch.float16 else ""
            raise UserError(f"tensor {name} holds NaN or infinity in {_said(own)}{wider}")


@torch.no_grad()
def check_runs(model: Any) -> None:
    """One small forward: weights may be finite where what they compute is not.

    Raises:
        UserError: if it fails, or a logit is NaN.
    """
    from kvpolicies.adapter import uncached_forward

    words = model.get_input_embeddings().weight
    ids = torch.arange(min(4, words.shape[0]), device=words.device)[None]
    try:
        logits = uncached_forward(model)(ids, ids)  # which are positions too
    except Exception as error:  # a config can be wrong in as many ways as a model has lines
        raise UserError(
            f"a first forward of {ids.shape[1]} tokens fails: {reason(error)}"
        ) from error
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise UserError(f"its logits are not finite in {_said(logits)}, though its weights are")


def reason(error: Exception) -> str:
    """Another library's error in one line."""
    text = " ".join(str(error).split())
    plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError) and text
    return (text if plain else f"{type(error).__name__} {text}".strip())[:LONGEST]


def _stem(name: str) -> str | None:
    """`model.layers.` of `model.layers.3.mlp.up_proj.weight`; None of what is in no layer."""
    found = re.match(r"(.*?\blayers\.)\d+\.", name)
    return found and found[1]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)}: {', '.join(names[:NAMED])}{more}"


def _said(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
