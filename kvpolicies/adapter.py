"""The one file that knows transformers' internals.

It registers an attention function and its mask function (once, at the first `attach`), and hides
the names that change between releases (5.17 says `past_key_values` where 5.24 says `cache`).
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

from kvpolicies.architecture import attention_modules, inspect_model
from kvpolicies.cache import FixedBudgetCache
from kvpolicies.errors import UserError
from kvpolicies.guard import counts_of, guarded, refuse_compiled, refuse_gradients
from kvpolicies.kernels.attention import masked_attention
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.kernels.packed import packed_attention
from kvpolicies.kernels.quantise import dequantise, quantise
from kvpolicies.norms import fused_norms
from kvpolicies.step import LayerInput

NAME = "kvpolicies"

# Attention modules of models inside an `attach` or a replay, with what serves them.
_served: dict[nn.Module, Callable[..., Tensor]] = {}


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
    modules = attention_modules(model)
    if any(m in _served for m in modules):
        raise UserError("this model is already attached to a cache; leave that `with` block first")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _served.update(zip(modules, serve, strict=True))
    try:
        with fused_norms(model):
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
    refuse_compiled(model)
    hidden: dict[int, Tensor] = {}
    softmaxes: dict[int, LogitTransform] = {}
    last = cache.shape.layers - 1

    def serve(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any
    ) -> Tensor:
        layer, (b, h) = module.layer_idx, key.shape[:2]
        softmax = softmaxes.get(layer)
        if softmax is None:  # it stays what it is
            softmax = softmaxes[layer] = _softmax(module, h, cache.shape.spans[layer], kw)
        given = LayerInput(
            query.reshape(b, h, -1, *query.shape[2:]),
            key,
            value,
            hidden.pop(layer, None),  # kept no longer than its layer
            softmax,
        )
        forward = cache.forward
        if forward is not None and forward.fixed is not None:
            return forward.fixed.attend(layer, given).flatten(1, 2)
        cache.take_over(layer, h)
        ours = forward is not None and forward.scheduled
        if layer == 0 and not ours:
            cache.allocate_once(query.shape[0], key.dtype, key.device)
            counts = counts_of(cache, query.shape[2], mask, kw.get("position_ids"))
            refuse_gradients(query, key, value)
            cache.begin(counts)
        elif not ours:
            refuse_gradients(query, key, value)
        out = cache.attend(layer, given)
        if layer == last:
            cache.finish()
        return out.flatten(1, 2)

    with _serving(model, [serve] * cache.shape.layers) as modules:
        cache.set_attached(True)
        try:
            with (
                _inputs_kept(modules if cache.policy.needs_input else [], hidden),
                guarded(model, cache, lambda: _served.get(modules[0]) is serve),
            ):
                yield cache
        finally:
            cache.set_attached(False)


@contextmanager
def _inputs_kept(modules: list[nn.Module], inputs: dict[int, Tensor]) -> Iterator[None]:
    """Puts what the attention modules are given, [B, T, E], into `inputs` by layer."""

    def keep(module: Any, args: tuple, kwargs: dict) -> None:
        inputs[module.layer_idx] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    hooks = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _softmax(module: Any, heads: int, span: int | None, given: dict[str, Any]) -> LogitTransform:
    """What the module hands to its attention function, beside queries, keys and values."""
    if given.get("sliding_window") != span:
        raise UserError(
            f"{type(module).__name__}: sliding window {given.get('sliding_window')} in layer "
            f"{module.layer_idx}, expected {span} from its config"
        )
    sink = given.get("s_aux")
    return LogitTransform(
        given.get("scaling") or module.scaling,
        given.get("softcap"),
        None if sink is None else sink.view(heads, -1),
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


def uncached_forward(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(tokens [A, T], positions [A, T]) -> last logits [A, V]; no cache object sees it.

    For all logits, in parts: head.py.
    """
    arguments: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in _parameters(type(model)):
        arguments["logits_to_keep"] = 1

    def run(tokens: Tensor, positions: Tensor) -> Tensor:
        # Without a padding mask transformers looks, and waits, for packed sequences.
        real = torch.ones_like(tokens)
        output = model(input_ids=tokens, position_ids=positions, attention_mask=real, **arguments)
        return output.logits[:, -1]

    return run


@contextmanager
def masked_dense(
    model: Any, mask: Callable[[int], Tensor], kind: str | None = None
) -> Iterator[None]:
    """Dense attention under `mask(layer)` [B, H, T, T] bool, one mask a KV head: for replays.

    `kind`: keys and values are read back from codes of this kind (kernels/quantise.py).
    """

    def serve(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kw: Any) -> Tensor:
        b, h, t, d = key.shape
        softmax = _softmax(module, h, spans[module.layer_idx], kw)
        grouped = query.reshape(b, h, -1, t, d)
        if kind:
            wide = torch.promote_types(query.dtype, torch.float32)
            key, value = (dequantise(quantise(x, kind), kind).to(wide) for x in (key, value))
            grouped = grouped.to(wide)
        out = masked_attention(grouped, key, value, mask(module.layer_idx), softmax)
        return out.to(query.dtype).flatten(1, 2)

    spans = inspect_model(model).spans
    with _serving(model, [serve] * len(attention_modules(model))):
        yield


@dataclass(frozen=True)
class LayerActivations:
    """What one full layer computes of whole sequences, before it attends."""

    layer: int
    queries: Tensor
    """[B, H, G, T, D], post-RoPE."""
    keys: Tensor
    """[B, H, T, D], post-RoPE."""
    values: Tensor
    """[B, H, T, D]."""
    inputs: Tensor | None
    """[B, T, E], the attention's input, if it was asked for."""
    softmax: LogitTransform


@contextmanager
def watched_dense(
    model: Any,
    see: Callable[[LayerActivations], Tensor | None],
    documents: Tensor | None = None,
    inputs: bool = False,
) -> Iterator[None]:
    """Dense causal attention that shows each full layer's queries, keys, values before it attends.

    What `see` returns, [B, H, G, T, D], stands for the layer's attention; None leaves it. Nothing
    that it is given is kept here for longer than its layer. A cache that the model is attached to
    steps aside until the block is left.

    Args:
        documents: [B, T] integer, never falling along a row: no query looks into another document
            than its own (positions are the caller's to give). None = one document a row.
        inputs: whether `see` is shown the attention's inputs too.
    """
    spans = inspect_model(model).spans
    kept: dict[int, Tensor] = {}

    def serve(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kw: Any) -> Tensor:
        b, h, t, d = key.shape
        layer, span = module.layer_idx, spans[module.layer_idx]
        softmax = _softmax(module, h, span, kw)
        queries = query.reshape(b, h, -1, t, d)
        given = kept.pop(layer, None)
        out = None
        if span is None:
            out = see(LayerActivations(layer, queries, key, value, given, softmax))
        if out is None:
            out = packed_attention(queries, key, value, softmax, documents, span)
        return out.flatten(1, 2)

    modules = attention_modules(model)
    attached = {m: _served.pop(m, None) for m in modules}
    try:
        with _serving(model, [serve] * len(spans)), _inputs_kept(modules if inputs else [], kept):
            yield
    finally:
        _served.update({m: f for m, f in attached.items() if f is not None})


def tensor_parallel(size: int) -> dict[str, Any]:
    """What `from_pretrained` takes for tensor parallelism by the model's own plan."""
    from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def hide_loading_bar() -> None:
    """Turns off transformers' own progress bar while weights load."""
    logging.disable_progress_bar()
