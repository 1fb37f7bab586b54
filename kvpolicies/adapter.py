"""The one file that knows transformers' internals.

It registers an attention function and its mask function (once, at the first `attach`), learns the
model's sizes and rotation, refuses by name what cannot work, and hides the names that change
between releases (5.17 says `past_key_values` where 5.24 says `cache`).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, logging

from kvpolicies.cache import FixedBudgetCache
from kvpolicies.errors import UserError
from kvpolicies.policy import Policy
from kvpolicies.rope import Rope
from kvpolicies.steps import Tokens, process

NAME = "kvpolicies"

# Attention modules of models inside an `attach` or a replay, with what serves them.
_served: dict[nn.Module, Callable[..., Tensor]] = {}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's attention."""

    layers: int
    heads: int
    groups: int
    head_dim: int


def inspect_model(model: Any, policy: Policy | None = None) -> Shape:
    """Reads a model's sizes.

    Raises:
        UserError: naming the model's architecture and what of it cannot work here.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    reason = _why_unsupported(model.config, config)
    modules = _attention_modules(model)
    if not reason and len(modules) != config.num_hidden_layers:
        reason = f"{len(modules)} attention layers for {config.num_hidden_layers} decoder layers"
    if not reason and policy is not None and (policy.needs_rope or policy.rerotates):
        reason = _why_unknown_rope(modules[0], config)
    if reason:
        raise UserError(f"model {name} ({config.model_type}) is not supported: {reason}")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(config.num_hidden_layers, kv_heads, heads // kv_heads, head_dim)


def _why_unsupported(whole: Any, config: Any) -> str:
    if getattr(whole, "is_encoder_decoder", False):
        return "encoder-decoder models attend across to an encoder; only decoders are evicted here"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) caches no keys and values per head"
    if getattr(config, "add_cross_attention", False):
        return "cross-attention is not evicted here"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layers of kind {', '.join(sorted(kinds - {'full_attention'}))}"
    if not hasattr(config, "num_attention_heads") or getattr(config, "state_size", None):
        return "state-space layers hold no KV cache"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding-window layers"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention logits are soft-capped"
    return ""


def _why_unknown_rope(module: nn.Module, config: Any) -> str:
    """Compares our rotation with the model's own function, on random numbers."""
    source = inspect.getmodule(type(module))
    theirs = getattr(source, "apply_rotary_pos_emb", None)
    if theirs is None:
        return "its rotary position embedding is not found, and this policy rotates queries itself"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return (
            f"RoPE of type {kind!r} changes with the length, and this policy rotates queries itself"
        )
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 3, 16, generator=g)
    cos, sin = torch.randn(2, 1, 3, 16, generator=g)
    cos[..., 8:], sin[..., 8:] = cos[..., :8], sin[..., :8]
    rope = Rope(lambda positions: (cos, sin))
    rope.prepare(3, q.device)
    try:
        expected = theirs(q, q, cos, sin)[0]
    except (TypeError, RuntimeError):
        expected = torch.zeros(())
    ours = rope.rotate(q, torch.arange(3)[None])
    if expected.shape != ours.shape or not torch.allclose(expected, ours, atol=1e-5):
        return "its rotary layout is not the half-split one, and this policy rotates queries itself"
    return ""


def _attention_modules(model: Any) -> list[nn.Module]:
    """The decoder's self-attention modules, by layer."""
    found = {
        m.layer_idx: m
        for m in model.modules()
        if isinstance(getattr(m, "layer_idx", None), int) and hasattr(m, "scaling")
    }
    return [found[i] for i in sorted(found)]


def find_ropes(model: Any) -> list[Rope]:
    """Each layer's rotation (one table, shared), from the model's own rotary embedding."""
    modules = _attention_modules(model)
    rotary = next((m for n, m in model.named_modules() if n.endswith("rotary_emb")), None)
    if rotary is None:
        return [Rope(None)] * len(modules)
    dummy = torch.empty(0, device=next(rotary.buffers()).device)

    @torch.no_grad()
    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(dummy, positions)

    shared = Rope(cos_sin)
    # Some models leave some layers without positions (SmolLM3).
    return [shared if getattr(m, "use_rope", True) else Rope(None) for m in modules]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: finds who serves this module, and asks it."""
    serve = _served.get(module)
    if serve is None:
        raise UserError("attention implementation 'kvpolicies' used outside of kvpolicies.attach")
    return serve(module, query, key, value, mask, **kwargs).transpose(1, 2).contiguous(), None


def _mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """transformers' mask function: hands the 2-D padding mask through untouched."""
    return attention_mask


@contextmanager
def _serving(model: Any, serve: list[Callable[..., Tensor]]) -> Iterator[list[nn.Module]]:
    """Routes the model's attention to `serve[layer]`, and undoes it on leaving."""
    modules = _attention_modules(model)
    if any(m in _served for m in modules):
        raise UserError("this model is already attached to a cache; leave that `with` block first")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _served.update(zip(modules, serve, strict=True))
    try:
        yield modules
    finally:
        for module in modules:
            _served.pop(module, None)
        model.set_attn_implementation(before)


@contextmanager
def attach(model: Any, cache: FixedBudgetCache) -> Iterator[FixedBudgetCache]:
    """Runs the model's attention on `cache` inside the `with` block; nothing stays changed.

    Raises:
        UserError: if the model is attached already, or the cache was made for another model.
    """
    if inspect_model(model, cache.policy) != cache.shape:
        raise UserError(f"the cache was made for {cache.shape}, not for {type(model).__name__}")
    inputs: dict[int, Tensor] = {}
    batch: list[tuple[list[int], list[int]]] = []

    def keep_input(module: Any, args: tuple, kwargs: dict) -> None:
        inputs[module.layer_idx] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def serve(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any
    ) -> Tensor:
        cache.take_over(module.layer_idx)
        if not cache.slot_layers:
            cache.allocate(query.shape[0], key.dtype, key.device)
        if module.layer_idx == 0:
            batch[:] = [cache.scheduled or _batch(cache, query, mask, kw.get("position_ids"))]
        rows, counts = batch[0]
        for name in ("softcap", "s_aux", "sliding_window"):
            if kw.get(name) is not None:
                raise UserError(f"{type(module).__name__}: {name} in attention is not supported")
        b, h = key.shape[:2]
        tokens = Tokens(
            query.reshape(b, h, -1, *query.shape[2:]),
            key,
            value,
            inputs.get(module.layer_idx),
            kw.get("scaling") or module.scaling,
        )
        return process(cache.slot_layers[module.layer_idx], tokens, rows, counts).flatten(1, 2)

    with _serving(model, [serve] * cache.shape.layers) as modules:
        hooks = [
            m.register_forward_pre_hook(keep_input, with_kwargs=True)
            for m in modules
            if cache.policy.needs_input
        ]
        cache.set_attached(True)
        try:
            yield cache
        finally:
            for hook in hooks:
                hook.remove()
            cache.set_attached(False)


def _batch(
    cache: FixedBudgetCache, query: Tensor, mask: Any, position_ids: Tensor | None
) -> tuple[list[int], list[int]]:
    """(rows, real tokens a row) of a forward that transformers' own loop runs."""
    rows, width = query.shape[0], query.shape[2]
    if rows != cache.slot_layers[0].geometry.rows:
        raise UserError(
            f"the cache holds {cache.slot_layers[0].geometry.rows} rows, the batch has {rows}; "
            "make a new FixedBudgetCache for a batch of another size"
        )
    counts = [width] * rows
    if width > 1 and mask is not None:
        if mask.dim() != 2:
            raise UserError("FixedBudgetCache: only a 2-D padding mask is supported")
        real = mask[:, -width:].bool()
        if bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise UserError("FixedBudgetCache: padding must be on the left of the prompt")
        counts = real.sum(-1).tolist()
    if width > 1 and position_ids is not None:
        _check_positions(cache, counts, position_ids)
    return list(range(rows)), counts


def _check_positions(cache: FixedBudgetCache, counts: list[int], position_ids: Tensor) -> None:
    """A row's tokens must be numbered from 0, padding apart: sinks and windows rest on it."""
    newest = position_ids[:, -1].expand(len(counts)).tolist()
    expected = [s + c - 1 for s, c in zip(cache.slot_layers[0].seen, counts, strict=True)]
    if any(c and n != e for n, e, c in zip(newest, expected, counts, strict=True)):
        raise UserError(
            f"FixedBudgetCache: position_ids end at {newest}, expected {expected}: number each "
            "row's tokens from 0, padding not counted (attention_mask.cumsum(-1) - 1)"
        )


@lru_cache(maxsize=64)
def _parameters(model_class: type) -> frozenset[str]:
    """Names that the class's forward takes."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def forward(
    model: Any, tokens: Tensor, positions: Tensor, cache: FixedBudgetCache | None = None
) -> Tensor:
    """One forward; logits [A, V] float32 of the last column, or of all columns without a cache."""
    arguments: dict[str, Any] = {"input_ids": tokens, "position_ids": positions}
    parameters = _parameters(type(model))
    if cache is None:
        arguments["use_cache"] = False
    else:
        arguments["cache" if "cache" in parameters else "past_key_values"] = cache
        if "logits_to_keep" in parameters:
            arguments["logits_to_keep"] = 1
    logits = model(**arguments).logits
    return (logits if cache is None else logits[:, -1]).float()


@contextmanager
def masked_dense(model: Any, mask: Callable[[int], Tensor]) -> Iterator[None]:
    """Dense attention under `mask(layer)` [B, H, T, T] bool, one mask a KV head: for replays."""

    def serve(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kw: Any) -> Tensor:
        b, h, t, d = key.shape
        out = nn.functional.scaled_dot_product_attention(
            query.reshape(b, h, -1, t, d),
            key[:, :, None],
            value[:, :, None],
            attn_mask=mask(module.layer_idx)[:, :, None],
            scale=kw.get("scaling") or module.scaling,
        )
        return out.flatten(1, 2)

    inspect_model(model)
    with _serving(model, [serve] * len(_attention_modules(model))):
        yield


def hide_loading_bar() -> None:
    """Turns off transformers' own progress bar while weights load."""
    logging.disable_progress_bar()
