"""Peak memory of a revisit analysis by trace length: it must not grow with the square.

    OMP_NUM_THREADS=1 python scripts/revisit_memory.py 8192 32768

A process a length. Random weights, 2 layers of 1 KV head and 2 query heads of 32; one policy's
eviction times (those of a window of 1,024, written down, not decoded).
"""

import argparse
import resource
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lengths", type=int, nargs="+")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    args = parser.parse_args()
    if args.here:
        measure(args.lengths[0])
        return
    for length in args.lengths:
        subprocess.run([sys.executable, __file__, "--here", str(length)], check=True)


def measure(length: int) -> None:
    """Prints what the analysis of one trace adds to the process' peak."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvpolicies.architecture import find_ropes
    from kvpolicies.eval.revisit.config import Revisit
    from kvpolicies.eval.revisit.evictions import Evictions
    from kvpolicies.eval.revisit.rows import analyse
    from kvpolicies.eval.revisit.setting import Setting
    from kvpolicies.eval.revisit.traces import Trace

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=length,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    asked = Revisit(policies=("streaming",), budgets=("1024",))
    tokens = torch.randint(128, (length + 1,)).tolist()
    times = (torch.arange(length, dtype=torch.int32) + 1024).expand(2, 1, length)
    analysis = Setting(asked, model, _Numbers(), find_ropes(model))
    trace = Trace("random", tokens[:64], tokens[64:])
    before, begin = _peak(), time.perf_counter()
    analyse(analysis, trace, [Evictions(times, 1024)], pictured=True)
    print(
        f"{length} tokens: peak +{_peak() - before:.0f} MiB over {before:.0f} MiB, "
        f"{time.perf_counter() - begin:.0f} s; one float32 S x S matrix: "
        f"{4 * length**2 / 2**20:.0f} MiB"
    )


class _Numbers:
    """A tokenizer that writes numbers."""

    def decode(self, tokens: list[int]) -> str:
        return f" {tokens[0]}"


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
