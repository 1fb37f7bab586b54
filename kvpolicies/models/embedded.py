"""The embedded model: a 0.6 M parameter Qwen3 that solves ledger problems, shipped in the package.

It makes a study mean something on a laptop: no download, seconds to run, one right trace a problem.
``kvpolicies.train.embedded.run`` recreates it; its model card lies beside the weights.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvpolicies.errors import UserError
from kvpolicies.models import weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@contextmanager
def assets(name: str = "ledger") -> Iterator[Path]:
    """The folder with the packaged weights, as a real path; UserError if a file is missing."""
    packaged = importlib.resources.files("kvpolicies.models") / "assets" / name
    missing = [file for file in FILES if not packaged.joinpath(file).is_file()]
    if missing:
        raise UserError(
            f"model embedded: {packaged} lacks {', '.join(missing)}; reinstall kvpolicies, or "
            "recreate them with python -m kvpolicies.train.embedded.run --out DIR"
        )
    with importlib.resources.as_file(packaged) as folder:
        yield folder


def load(
    dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """The model, on the CPU and in evaluation mode, and its tokenizer (one token a word).

    `options` go to the model's `from_pretrained`.
    """
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    with assets() as folder:
        model = weights.pretrained(
            Qwen3ForCausalLM, folder, dtype=dtype, local_files_only=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer
