"""What a forward of transformers' own loop brings, and what that loop is not to ask for.

Our own loop asks for none of it. transformers' `generate` and a loop of the user's own might: then
attention would run without the cache, or on tokens that are not the conversation's, and answers
would be wrong without a word.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvpolicies.cache import FixedBudgetCache
from kvpolicies.errors import UserError
from kvpolicies.rows import Counts

# Options of `generate` that cannot work on this cache, with the values that leave them off.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True),
    "num_beams": (None, 1),
    "guidance_scale": (None, 1),
    "assistant_model": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "cache_implementation": (None, "dynamic"),
}
REASONS = {
    "use_cache": "the cache is what is being run",
    "num_beams": "beam search is not supported; use num_beams=1",
    "guidance_scale": "it runs a second, unconditional sequence with a cache of its own",
    "assistant_model": "evicted tokens do not come back when a guess is taken back",
    "penalty_alpha": "contrastive search runs candidates that are taken back",
    "cache_implementation": "the attached cache is the implementation",
}


@contextmanager
def guarded(model: Any, cache: FixedBudgetCache, attached: Callable[[], bool]) -> Iterator[None]:
    """Watches the model's forwards and its `generate` inside the `with` block.

    Args:
        attached: whether the model's attention is the cache's at this moment.
    """
    inner = model.generate if hasattr(model, "generate") else None

    def before(module: Any, args: tuple, kwargs: dict) -> None:
        if (cache.forward is not None and cache.forward.scheduled) or not attached():
            return
        cache.abandon()
        if kwargs.get("use_cache") is False:
            raise _refused("use_cache=False", REASONS["use_cache"])
        if module.training and getattr(module, "is_gradient_checkpointing", False):
            raise _refused("gradient checkpointing", "it turns the cache off")
        _remember(cache, kwargs.get("input_ids", args[0] if args else None))

    def generate(*args: Any, **kwargs: Any) -> Any:
        assert inner is not None
        given = inspect.signature(inner).bind_partial(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        _check_options(model, given)
        cache.prompt_columns = _prompt_columns(cache, given)
        try:
            return inner(*args, **kwargs)
        finally:
            cache.prompt_columns = None

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    if inner is not None:
        model.generate = generate
    try:
        yield
    finally:
        hook.remove()
        if inner is not None:
            del model.generate


def counts_of(
    cache: FixedBudgetCache, width: int, mask: Tensor | None, position_ids: Tensor | None
) -> Counts:
    """What a forward brings that transformers' own loop runs, or one of the user's own."""
    rows, before = cache.evicting.rows, cache.columns - width
    n = cache.rows
    tokens = torch.full((n,), width)
    if mask is not None:
        tokens = _real(cache, width, mask)
    if position_ids is not None:
        _check_positions(cache, width, mask, position_ids)
    counts = tokens.tolist()
    if cache.prompt_columns is None:
        # A loop of the user's own: one token a row is a new one.
        prompt = [count > 1 or seen == 0 for count, seen in zip(counts, rows.seen, strict=True)]
        ended = [False] * n
    else:
        prompt = [before < cache.prompt_columns] * n
        ended = [cache.columns >= cache.prompt_columns] * n
    return Counts(range(n), counts, prompt, ended)


def _real(cache: FixedBudgetCache, width: int, mask: Tensor) -> Tensor:
    """Real tokens [B] of a forward's `width` columns; what the mask says of earlier ones must hold.

    Raises:
        UserError: for a mask of other columns than the cache has seen, or padding on the right.
    """
    if mask.dim() != 2:
        raise UserError("FixedBudgetCache: only a 2-D padding mask is supported")
    if mask.shape != (cache.rows, cache.columns):
        raise UserError(
            f"FixedBudgetCache: attention_mask is {list(mask.shape)}, expected "
            f"{[cache.rows, cache.columns]}: {cache.columns - width} columns seen before and "
            f"{width} new ones"
        )
    real = mask.bool().cpu()
    old, new = real[:, : cache.columns - width].sum(-1), real[:, cache.columns - width :]
    seen = cache.evicting.rows.seen
    if old.tolist() != seen:
        raise UserError(
            f"FixedBudgetCache: attention_mask marks {old.tolist()} earlier tokens as real, but "
            f"the cache has seen {seen}"
        )
    if bool((new[:, :-1] & ~new[:, 1:]).any()):
        raise UserError("FixedBudgetCache: padding must be on the left of the prompt")
    return new.sum(-1)


def _check_positions(
    cache: FixedBudgetCache, width: int, mask: Tensor | None, position_ids: Tensor
) -> None:
    """A row's tokens must be numbered from 0, padding apart: sinks and windows rest on it."""
    came = position_ids.expand(cache.rows, width).cpu()
    real = torch.ones(cache.rows, width, dtype=torch.bool)
    if mask is not None:
        real = mask[:, -width:].bool().cpu()
    expected = torch.tensor(cache.evicting.rows.seen)[:, None] + real.cumsum(-1) - 1
    wrong = ((came != expected) & real).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise UserError(
            f"FixedBudgetCache: position_ids give {int(came[row, column])} to a token of row {row} "
            f"whose position is {int(expected[row, column])}: number each row's tokens from 0, "
            "padding not counted (attention_mask.cumsum(-1) - 1)"
        )


def refuse_gradients(*tensors: Tensor) -> None:
    """Raises UserError if a gradient is wanted of what the cache computes."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UserError(
            "FixedBudgetCache: no gradient flows through the cache; run the model under "
            "torch.no_grad(), or train it without `attach`"
        )


def refuse_compiled(model: Any) -> None:
    """Raises UserError for a model that torch.compile has wrapped."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise UserError(
            "FixedBudgetCache: a model under torch.compile is not supported; give the model "
            "itself, and kvpolicies.generate(..., step='compiled') compiles its decode steps"
        )


def _check_options(model: Any, given: dict[str, Any]) -> None:
    config = given.get("generation_config") or getattr(model, "generation_config", None)
    for name, off in OPTIONS.items():
        value = given.get(name, getattr(config, name, None))
        if not any(value is x or value == x for x in off):
            raise _refused(f"{name}={_shown(value)}", REASONS.get(name, ""))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str | bool) else type(value).__name__


def _refused(what: str, why: str) -> UserError:
    return UserError(f"FixedBudgetCache: {what} is not supported" + (f": {why}" if why else ""))


def _remember(cache: FixedBudgetCache, ids: Any) -> None:
    if cache.history is not None:
        if isinstance(ids, Tensor) and ids.dim() == 2:
            cache.history.append(ids.detach())
        else:
            cache.history = None


def _prompt_columns(cache: FixedBudgetCache, given: dict[str, Any]) -> int | None:
    """Columns of the prompt that `generate` was given, those that the cache has seen included.

    Raises:
        UserError: if the prompt does not go on where the cache's conversation stopped.
    """
    ids = given.get("inputs")
    ids = given.get("input_ids") if ids is None else ids
    mask, embeds = given.get("attention_mask"), given.get("inputs_embeds")
    if isinstance(embeds, Tensor):
        return embeds.shape[1]
    if not isinstance(ids, Tensor):
        return None
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] != ids.shape[1]:
        return mask.shape[1]  # only the new tokens were given, and the mask of all
    if cache.columns and not _continues(cache, ids):
        raise UserError(
            f"FixedBudgetCache: it holds another conversation, of {cache.columns} tokens a row; "
            "call cache.reset() first, or give a prompt that begins with what it has seen"
        )
    return ids.shape[1]


def _continues(cache: FixedBudgetCache, ids: Tensor) -> bool:
    seen = cache.columns
    if ids.shape[1] <= seen:
        return False
    if not cache.history:
        return True  # nobody knows what it saw: it came as embeddings
    known = torch.cat(cache.history, dim=1)
    cache.history = [known]
    copies = known.shape[0] // max(1, ids.shape[0])
    prefix = ids[:, :seen].to(known.device).repeat_interleave(copies, dim=0)
    return known.shape == prefix.shape and bool((known == prefix).all())
