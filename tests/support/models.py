"""Tiny random models, made on the spot: no downloads."""

from functools import cache
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@cache
def tiny(family: str = "qwen3", heads: int = 4, kv_heads: int = 2, layers: int = 2) -> Any:
    """A random model with weights large enough that its attention is not uniform."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=16 * heads,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
        use_sliding_window=False,
    )
    torch.manual_seed(0)
    return model_class(config).eval()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in lengths]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask), padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    return ids, mask
