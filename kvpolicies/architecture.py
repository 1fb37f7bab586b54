"""What a model is made of, as far as its cache must know; and what cannot work, refused by name."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicies.errors import UserError
from kvpolicies.policy import Policy
from kvpolicies.rope import Rope

KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers that hold keys and values of the past."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's attention."""

    layers: int
    heads: int
    groups: int
    head_dim: int
    spans: tuple[int | None, ...]
    """Per layer: tokens that a query looks back, itself included; None = all."""
    first_head: int = 0
    """Number of the first KV head of this process, where tensor parallelism spreads them."""
    parts: int = 1
    """Processes that the KV heads are spread over; `heads` are those of this one."""

    @property
    def full(self) -> tuple[int, ...]:
        """Layers that see all tokens, which are those that a policy evicts."""
        return tuple(i for i, span in enumerate(self.spans) if span is None)

    @property
    def evicted(self) -> int:
        """How many layers a policy evicts."""
        return len(self.full)


def inspect_model(model: Any, policy: Policy | None = None) -> Shape:
    """Reads a model's sizes.

    Raises:
        UserError: naming the model's architecture and what of it cannot work here.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    reason = _why_unsupported(model.config, config)
    modules = attention_modules(model)
    if not reason and not modules:
        reason = "it has no attention layers"
    if not reason and len(modules) != config.num_hidden_layers:
        reason = f"{len(modules)} attention layers for {config.num_hidden_layers} decoder layers"
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    parts = _parts(model)
    if not reason and kv_heads % parts:
        reason = f"{kv_heads} KV heads cannot be spread evenly over {parts} processes"
    if not reason and parts > 1 and policy is not None and policy.mixes_heads:
        reason = (
            f"policy {policy} scores a layer's KV heads together, and tensor parallelism spreads "
            f"them over {parts} processes; run it in one, or share the problems out instead"
        )
    if not reason and heads % kv_heads:
        reason = f"{heads} query heads cannot share {kv_heads} KV heads evenly"
    spans = () if reason else _spans(config)
    if not reason and policy is not None:
        reason = _why_not_under(policy, modules, spans)
    if reason:
        raise UserError(f"model {name} ({config.model_type}) is not supported: {reason}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    own = kv_heads // parts
    first = own * (torch.distributed.get_rank() % parts) if parts > 1 else 0
    return Shape(config.num_hidden_layers, own, heads // kv_heads, head_dim, spans, first, parts)


def _parts(model: Any) -> int:
    """Processes that transformers' tensor parallelism spreads the model's KV heads over.

    1 where its plan leaves the heads together: what it splits, it gathers before attention.
    """
    size = getattr(model, "tp_size", None) or 1
    plan = (getattr(model, "tp_plan", None) or {}) if size > 1 else {}
    split = any(k.endswith(".k_proj") and v == "colwise" for k, v in plan.items())
    return size if split else 1


def attention_modules(model: Any) -> list[nn.Module]:
    """The decoder's self-attention modules, by layer."""
    found = {
        m.layer_idx: m
        for m in model.modules()
        if isinstance(getattr(m, "layer_idx", None), int) and hasattr(m, "scaling")
    }
    return [found[i] for i in sorted(found)]


def rotates_by_halves(model: Any) -> bool:
    """Whether `find_ropes` knows this model's rotation, which it then can undo."""
    rotary = any(name.endswith("rotary_emb") for name, _ in model.named_modules())
    return not rotary or _layout(attention_modules(model)[0]) is not None


def find_ropes(model: Any) -> list[Rope]:
    """Each layer's rotation (one table a kind of layer), from the model's own rotary embedding."""
    modules = attention_modules(model)
    rotary = next((m for n, m in model.named_modules() if n.endswith("rotary_emb")), None)
    if rotary is None:
        return [Rope(None)] * len(modules)
    config = model.config.get_text_config(decoder=True)
    # Some models rotate each kind of layer in its own way (Gemma 3).
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    kinds = getattr(config, "layer_types", None) if by_kind else None
    layout = _layout(modules[0])
    shared: dict[str | None, Rope] = {}
    for kind in kinds or [None]:
        if kind not in shared:
            shared[kind] = Rope(_table(rotary, kind, layout), _limit(config, kind))
    # ... and some leave some layers without positions (SmolLM3).
    return [
        shared[kinds[i] if kinds else None] if getattr(m, "use_rope", True) else Rope(None)
        for i, m in enumerate(modules)
    ]


def find_outputs(model: Any) -> list[Tensor]:
    """Each layer's output projection [H, G, D, E], of the KV heads that lie in this process.

    Raises:
        UserError: for a model whose attention has none that can be read.
    """
    shape, found = inspect_model(model), []
    for module in attention_modules(model):
        weight = getattr(getattr(module, "o_proj", None), "weight", None)
        weight = getattr(weight, "to_local", lambda w=weight: w)()  # its part, if it is spread
        columns = shape.heads * shape.groups * shape.head_dim
        if weight is None or not weight.is_floating_point() or weight.shape[1:] != (columns,):
            raise UserError(
                f"model {type(model).__name__}: this policy reads the attention's output "
                f"projection, and layer {module.layer_idx} has none of numbers [*, {columns}]"
            )
        heads = weight.detach().view(-1, shape.heads, shape.groups, shape.head_dim)
        found.append(heads.permute(1, 2, 3, 0))
    return found


def _why_unsupported(whole: Any, config: Any) -> str:
    if getattr(whole, "is_encoder_decoder", False):
        return "encoder-decoder models attend across to an encoder; only decoders are evicted here"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) caches no keys and values per head"
    if getattr(config, "add_cross_attention", False):
        return "cross-attention is not evicted here"
    if not hasattr(config, "num_attention_heads") or getattr(config, "state_size", None):
        return "state-space layers hold no KV cache"
    others = set(getattr(config, "layer_types", None) or KINDS) - KINDS
    return f"layers of kind {', '.join(sorted(others))}" if others else ""


def _spans(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = "sliding" if window and getattr(config, "use_sliding_window", True) else "full"
        kinds = [f"{kind}_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _why_not_under(policy: Policy, modules: list[nn.Module], spans: tuple[int | None, ...]) -> str:
    if policy.evicts and None not in spans:
        return (
            f"every layer has a sliding window of {spans[0]} tokens and holds no more by itself; "
            "nothing is left to evict (policy full runs)"
        )
    if (policy.needs_rope or policy.rerotates) and _layout(modules[0]) is None:
        return (
            "its rotary position embedding is not one of the half-split layouts, and this policy "
            "rotates queries itself"
        )
    return ""


def _limit(config: Any, kind: str | None) -> int | None:
    """The length up to which the rotation does not depend on the length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(kind, parameters) if kind else parameters
    if parameters.get("rope_type", "default") not in ("dynamic", "longrope"):
        return None
    own = getattr(config, "original_max_position_embeddings", None)
    return (
        parameters.get("original_max_position_embeddings") or own or config.max_position_embeddings
    )


def _table(
    rotary: nn.Module, kind: str | None, layout: str | None
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    device = next(rotary.buffers()).device
    dummy = torch.empty(0, device=device)

    @torch.no_grad()
    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(dummy, positions, kind) if kind else rotary(dummy, positions)
        return (_twice(cos), _twice(sin)) if layout == "halves" else (cos, sin)

    return cos_sin


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)


def _layout(module: nn.Module) -> str | None:
    """How the model's cos and sin cover a head, found by running its own function.

    "whole": a number a dimension, the two halves alike (most models); "halves": one for each pair
    (GPT-OSS); None: another rotation than the half-split one, or none that is found.
    """
    theirs = getattr(inspect.getmodule(type(module)), "apply_rotary_pos_emb", None)
    if theirs is None:
        return None
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 3, 16, generator=g)
    half_cos, half_sin = torch.randn(2, 1, 3, 8, generator=g)
    cos, sin = _twice(half_cos), _twice(half_sin)
    rope = Rope(lambda positions: (cos, sin))
    rope.prepare(3, q.device)
    ours = rope.rotate(q, torch.arange(3)[None])
    for name, given in (("whole", (cos, sin)), ("halves", (half_cos, half_sin))):
        try:
            result = theirs(q, q, *given)[0]
        except (TypeError, RuntimeError, ValueError):
            continue
        if result.shape == ours.shape and torch.allclose(result, ours, atol=1e-5):
            return name
    return None
