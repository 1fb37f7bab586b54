"""How many positions and words a model was made for, and what is said of what goes beyond them.

Any prompt that a model is given passes `check_positions` and `check_words`. Rotary embeddings can
be computed for any position, and mean nothing beyond those that the model was trained on; a table
of learned ones ends.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpolicies.errors import UserError, caution


class Reach(NamedTuple):
    """Positions of a model; None where its config names no number."""

    own: int | None
    """That it was made for."""
    scaled: int | None
    """That its RoPE scaling stretches them to; `own` without any."""
    table: bool
    """Whether positions are a table, which ends, and no rotation."""


def reach(config: Any) -> Reach:
    """Reads a transformers config."""
    config = config.get_text_config(decoder=True)
    own = getattr(config, "max_position_embeddings", None) or None
    parameters = getattr(config, "rope_parameters", None) or {}
    if own is None:
        return Reach(None, None, False)
    # Some models rotate each kind of layer in its own way (Gemma 3).
    kinds = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    scaled = [_stretched(p, own) for p in kinds if p.get("rope_type", "default") != "default"]
    return Reach(own, max([own, *scaled]), not parameters)


def _stretched(parameters: dict[str, Any], own: int) -> int:
    original = parameters.get("original_max_position_embeddings") or own
    return int(original * (parameters.get("factor") or 1))


def check_positions(model: Any, prompt: int, new: int = 0, what: str = "a prompt") -> None:
    """Looks at the longest prompt, and the longest of prompt and new tokens, before they run.

    A prompt beyond the model's positions is refused, or one line of caution where its RoPE scaling
    allows it. New tokens may end before, and are a caution, but for positions in a table.

    Args:
        prompt: tokens of the longest prompt.
        new: most new tokens behind any.
        what: how a message names the prompt.

    Raises:
        UserError: for a prompt that is too long.
    """
    own, scaled, table = reach(model.config)
    if own is None or scaled is None:
        return
    if prompt > scaled:
        raise UserError(
            f"{what} of {prompt} tokens is longer than the {scaled} positions of the model: "
            "shorten it, or take a model of more"
        )
    if prompt > own:
        caution(
            f"prompts are longer than the {own} positions that the model was made for, and within "
            f"the {scaled} that its RoPE scaling allows"
        )
    elif prompt + new - 1 > scaled:
        text = f"prompts and new tokens reach beyond the {scaled} positions of the model"
        if table:
            raise UserError(f"{text}, whose table of them ends there: ask for fewer new tokens")
        caution(f"{text}: what it writes there may mean nothing")


def check_words(model: Any, tokens: Sequence[int], what: str) -> None:
    """Looks at token ids before a model is given them.

    Args:
        what: holds them, for the beginning of a sentence.

    Raises:
        UserError: for one that the model has not.
    """
    words = model.config.get_text_config(decoder=True).vocab_size
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < words:
            raise UserError(f"{what} holds token {token}; the model's are 0 to {words - 1}")
