"""Peak memory of training's passes on a CPU, by length of the row.

    OMP_NUM_THREADS=1 python scripts/training_memory.py pass --lengths 4096 8192 16384
    OMP_NUM_THREADS=1 python scripts/training_memory.py frozen --lengths 4096 --layers 1 2 4

`pass` is the future attention mass with its log-sum-exp; `frozen` a whole training step of that
recipe on a model of Qwen3-0.6B's sizes with random weights, its vocabulary and layers aside. Each
line is a process of its own; its peak is the most resident memory (Linux: VmHWM) above what there
was before, inputs and weights included there.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HEADS, GROUPS, D = 8, 2, 128
VOCABULARY = 4096


def peak(work: Callable[[], Any]) -> int:
    """Bytes of resident memory that `work` needed at its highest, above what was there."""
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    work()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "needs Linux"
    return 1024 * int(found[1])


def transposed(length: int, heads: int) -> int:
    """The two passes that make a target, float32."""
    from kvpolicies.kernels.causal import causal_lse
    from kvpolicies.kernels.future import future_log_mass
    from kvpolicies.kernels.logit_transform import LogitTransform

    keys, soft = torch.randn(1, heads, length, D), LogitTransform(D**-0.5)
    queries = torch.randn(1, heads, GROUPS, length, D)

    def work() -> None:
        lse = causal_lse(queries, keys, soft)
        future_log_mass(queries, keys, lse, soft, 256)

    return peak(work)


def frozen(length: int, layers: int) -> int:
    """A training step: forward, targets, loss and gradients of every layer."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from kvpolicies.train.fit import new_scorer
    from kvpolicies.train.module import Frozen
    from kvpolicies.train.recipe import Recipe

    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, head_dim=D,
        num_attention_heads=HEADS * GROUPS, num_key_value_heads=HEADS, vocab_size=VOCABULARY,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    recipe = Recipe(kind="kvpop_mlp", sequence=length, batch=1, dtype="bfloat16")
    module = Frozen(model, new_scorer(recipe, model), recipe)
    tokens = torch.randint(0, VOCABULARY, (1, length))

    def work() -> None:
        module.step(tokens, torch.zeros_like(tokens))[1].backward()

    return peak(work)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["pass", "frozen"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2], help="of frozen")
    parser.add_argument("--heads", type=int, nargs="+", default=[2], help="KV heads of pass")
    parser.add_argument("--one", action="store_true", help="print bytes of the first alone")
    args = parser.parse_args()
    work, many = (transposed, args.heads) if args.what == "pass" else (frozen, args.layers)
    if args.one:
        print(work(args.lengths[0], many[0]))
        return
    option = "--heads" if args.what == "pass" else "--layers"
    print(f"| tokens | {option[2:]} | peak MiB |\n|---:|---:|---:|")
    for length in args.lengths:
        for number in many:
            command = [sys.executable, __file__, args.what, "--one", "--lengths", str(length)]
            done = subprocess.run(
                [*command, option, str(number)], check=True, stdout=subprocess.PIPE, text=True
            )
            print(f"| {length} | {number} | {int(done.stdout) / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    main()
