"""What only a GPU with vLLM can tell of `kvpolicies vllm`: the same tokens, speed, memory.

    python scripts/gpu_check_vllm.py --out gpu_check_vllm.json      about 30 minutes on one GPU
    python scripts/gpu_check_vllm.py --dry-run                      tiny shapes on a CPU

Tokens inside vLLM are compared with those of `kvpolicies.generate`, in float32 on the embedded
model. Then Qwen3-4B's config with random weights answers 1, 16, 64 and 256 requests of 1,024 +
8,192 tokens in stock vLLM and under policies of 1,024 slots. Each cell is a process of its own,
whose memory goes with it; one that fails is named with its reason. Nothing is downloaded.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STOCK = "stock vLLM"
EQUAL = ("streaming", "h2o", "snapkv", "rkv", "beacon")
FAST = (STOCK, "streaming", "h2o", "beacon")


@dataclass(frozen=True)
class Sizes:
    """Of the check of speed."""

    preset: str
    requests: tuple[int, ...]
    prompt: int
    new: int
    slots: int


FULL = Sizes("qwen3-4b", (1, 16, 64, 256), 1024, 8192, 1024)
DRY = Sizes("small", (1, 4), 40, 40, 48)


def engine(model: str, policy: str, slots: int, length: int, rows: int, dtype: str) -> Any:
    """A `vllm.LLM`: stock, or with a policy."""
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    from kvpolicies.config import Deployment
    from kvpolicies.vllm.arguments import check, engine_arguments, terms_of

    given: dict[str, Any] = {"model": model, "dtype": dtype, "max_model_len": length,
                             "max_num_seqs": rows, "enable_prefix_caching": False}  # fmt: skip
    if policy != STOCK:
        config = Deployment(model=model, policy=policy, budget=str(slots), max_length=length,
                            batch_size=rows, dtype=dtype)  # fmt: skip
        chosen, found = check(config)
        given = engine_arguments(config, terms_of(config, found), chosen)
    given["enforce_eager"] = not torch.cuda.is_available()
    if model != "embedded":
        given.update(load_format="dummy", skip_tokenizer_init=True)
    return vllm.LLM(**given)


def generated(llm: Any, prompts: list[list[int]], new: int, stops: bool) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    import vllm  # pyright: ignore[reportMissingImports]

    sampling = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=not stops,
                                   detokenize=stops)  # fmt: skip
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in llm.generate(asked, sampling)]


def same_tokens(policy: str) -> dict[str, Any]:
    """How many of eight answers vLLM gives as `generate` does."""
    import torch

    from kvpolicies import generate
    from kvpolicies.eval.tasks import ledger
    from kvpolicies.models import loading

    model, tokenizer = loading.load("embedded")
    problems = [ledger.make_problem(seed, length=400) for seed in range(8)]
    prompts = [tokenizer(p.prompt)["input_ids"] for p in problems]
    torch.backends.cuda.matmul.allow_tf32 = False
    made = generate(model, prompts, policy, 101, max_new_tokens=200, batch_size=4)
    llm = engine("embedded", policy, 101, 1024, 4, "float32")
    got = generated(llm, prompts, 200, stops=True)
    return {"same": sum(a == b.tokens for a, b in zip(got, made, strict=True)), "of": len(made)}


def speed(policy: str, sizes: Sizes, requests: int) -> dict[str, Any]:
    """New tokens a second of so many requests at once, after a run that warms up."""
    import torch

    from kvpolicies.models.presets import preset

    folder = ROOT / "build" / sizes.preset
    preset(sizes.preset).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    length = sizes.prompt + sizes.new
    llm = engine(str(folder), policy, sizes.slots, length, requests, "bfloat16")
    prompts = [[(7 * i + j) % 1000 for j in range(sizes.prompt)] for i in range(requests)]
    generated(llm, prompts[:1], 8, stops=False)
    begin = time.perf_counter()
    made = generated(llm, prompts, sizes.new, stops=False)
    seconds = time.perf_counter() - begin
    row = {"requests": requests, "tokens/s": round(sum(map(len, made)) / seconds, 1)}
    if torch.cuda.is_available():
        row["bytes in use"] = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    return row


def in_process(cell: dict[str, Any], dry: bool, seconds: float) -> dict[str, Any]:
    """Runs a cell in a process of its own."""
    command = [sys.executable, __file__, "--cell", json.dumps(cell), *(["--dry-run"] * dry)]
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
    if dry:
        environment.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True,
                              timeout=seconds)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {**cell, "failed": f"not done after {seconds:.0f} s"}
    if done.returncode:
        return {**cell, "failed": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return {**cell, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    """Runs all cells, or the one that a process of its own is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--seconds", type=float, default=600, help="for each cell, at most")
    parser.add_argument("--out", type=Path, default=Path("gpu_check_vllm.json"), help="JSON file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = DRY if args.dry_run else FULL
    if args.cell:
        cell = json.loads(args.cell)
        one = same_tokens(cell["policy"]) if cell["check"] == "tokens" else speed(
            cell["policy"], sizes, cell["requests"])  # fmt: skip
        print("\n" + json.dumps(one))
        return 0
    cells: list[dict[str, Any]] = [{"check": "tokens", "policy": p} for p in EQUAL]
    cells += [{"check": "speed", "policy": p, "requests": n} for n in sizes.requests for p in FAST]
    rows = []
    for cell in cells[3:7] if args.dry_run else cells:
        rows.append(in_process(cell, args.dry_run, args.seconds))
        print(json.dumps(rows[-1]), flush=True)
        args.out.write_text(json.dumps(rows, indent=1))
    wrong = [row for row in rows if "failed" in row or row.get("same") != row.get("of")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
