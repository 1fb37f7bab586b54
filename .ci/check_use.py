"""Check that the package at FOLDER is the one imported, and works: `python check_use.py FOLDER`.

Imports a Llama model of transformers, every room, and decodes a few tokens of the embedded model
under a budget.
"""

import importlib
import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM


def main(folder: Path) -> None:
    package = importlib.import_module("kvpolicies")
    assert Path(str(package.__file__)).resolve().is_relative_to(folder.resolve()), package.__file__
    for room in ("kernels.fps", "beacon", "learned", "eval", "train"):
        importlib.import_module(f"kvpolicies.{room}")

    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))

    print("in use:", package.__file__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
