"""Sizes of well-known models, for random weights: what `bench --random` takes by name."""

from typing import Any

from kvpolicies.errors import UserError, nearest, shown


def preset(name: str) -> Any:
    """A transformers config by a short name: public sizes, no download.

    Raises:
        UserError: for another name.
    """
    check(name)
    from transformers import Qwen3Config

    return Qwen3Config(**PRESETS[name])


def check(name: str) -> None:
    """Raises UserError unless a preset has this name; nothing heavy is imported."""
    if name not in PRESETS:
        raise UserError(f"no preset {shown(name)}: {nearest(name, list(PRESETS))}")


def _qwen3(width: int, inner: int, layers: int, heads: int, kv: int, size: int, **more: Any) -> Any:
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": size,
    }
    return {**sizes, "vocab_size": 151_936, "max_position_embeddings": 40_960, **more}


PRESETS: dict[str, dict[str, Any]] = {
    # For laptops.
    "small": _qwen3(256, 768, 8, 8, 2, 64, vocab_size=1024, tie_word_embeddings=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, 128, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, 128, tie_word_embeddings=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8, 128, tie_word_embeddings=False),
}
"""Sizes from the models' published config.json."""
