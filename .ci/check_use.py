"""Check that the package under FOLDER is the one imported, and that it works.

`python - FOLDER [NAME] <check_use.py` imports a Llama model of transformers and every room, and
decodes a few tokens of the embedded model under a budget. NAME is another package that must be
importable beside ours.
"""

import importlib
import sys
from pathlib import Path

from transformers import LlamaForCausalLM


def main(folder: Path, *others: str) -> None:
    assert LlamaForCausalLM
    for name in others:
        file = str(importlib.import_module(name).__file__)
        assert "site-packages" in file, f"{name} is not the installed package but {file}"

    from kvpolicies import generate
    from kvpolicies.models.loading import load

    for room in ("kernels.fps", "beacon", "learned", "eval", "train"):
        module = importlib.import_module(f"kvpolicies.{room}")
        assert folder.resolve() in Path(str(module.__file__)).resolve().parents, module.__file__

    model, _ = load("embedded")
    for policy in ("streaming", "beacon"):
        (done,) = generate(model, [list(range(1, 41))], policy, 24, max_new_tokens=8)
        assert 0 < len(done.tokens) <= 8 and done.max_slots == 24, done
    print("in use:", importlib.import_module("kvpolicies").__file__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
