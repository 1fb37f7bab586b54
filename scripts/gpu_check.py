"""What only a GPU can tell: kernels, graph decoding, memory and speed. Prints one table.

    python scripts/gpu_check.py --out gpu_check.json              under 8 minutes on one GPU
    python scripts/gpu_check.py --dry-run                         tiny shapes on a CPU

Kernels are compared with their torch references in float32 and bfloat16, and their bytes a second
with a copy measured on the same device. A decode step in a CUDA graph must give the tokens of an
eager one. Then Qwen3-4B's config with random weights decodes under each policy. What does not fit
into the time is named, not run. Nothing is downloaded.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from kvpolicies.kernels import backend, causal, compact, decode, fps, future, observe, redundancy
from kvpolicies.kernels.logit_transform import LogitTransform
from scripts.gpu_training import scoring, training

Row = dict[str, Any]


def mend_interpreter() -> None:
    """Triton 3.6's interpreter makes loop bounds by int(array of shape [1]): numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


class Clock:
    """The time that is left, and how long something takes on the device."""

    def __init__(self, device: torch.device, seconds: float):
        self.device, self.end = device, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the check must be done."""
        return self.end - time.monotonic()

    def sync(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ms(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Median of `repeats` runs, after one to warm up."""
        run()
        laps = []
        for _ in range(repeats if self.device.type == "cuda" else 1):
            self.sync()
            begin = time.perf_counter()
            run()
            self.sync()
            laps.append(1000 * (time.perf_counter() - begin))
        return sorted(laps)[len(laps) // 2]


def copy_speed(clock: Clock, dry: bool) -> float:
    """GB/s of a device copy, read and written bytes together."""
    block = torch.empty(1 << (20 if dry else 30), dtype=torch.uint8, device=clock.device)
    other = torch.empty_like(block)
    return 2 * block.numel() / clock.ms(lambda: other.copy_(block)) / 1e6


def kernels(clock: Clock, dry: bool, copied: float) -> Iterator[Row]:
    """Each kernel against its reference, and its speed."""
    real = [(8, 8, 4, 32, 2048, 128), (64, 8, 4, 32, 1024, 128)]
    for shape in [(1, 1, 2, 3, 37, 32)] if dry else real:
        for dtype in (torch.float32, torch.bfloat16):
            for name, run, moved in _cases(shape, dtype, clock.device):
                result = _compared(clock, run, moved, copied, dtype)
                yield {"check": f"{name} {shape} {str(dtype)[6:]}", **result}


def _cases(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[tuple[str, Callable[[], Any], int]]:
    """(name, call, bytes moved) of each kernel at (B, H, G, N, L, D)."""
    b, h, g, n, length, d = shape
    q = torch.randn(b, h, g, n, d, device=device, dtype=dtype)
    k, v = torch.randn(2, b, h, length, d, device=device, dtype=dtype)
    at = torch.arange(length - n, length, device=device).expand(b, n)
    held = torch.arange(length, device=device, dtype=torch.int32).repeat(b, h, 1)
    softmax, keys = LogitTransform(d**-0.5), k.numel() * k.element_size()
    one = q[:, :, :, :1]
    all_q = torch.randn(b, h, g, length, d, device=device, dtype=dtype)
    with backend.backend("torch"):
        lse = causal.causal_lse(all_q, k, softmax)
    read = keys + all_q.numel() * all_q.element_size()
    gone = torch.rand(b, h, length, device=device).argsort(-1)[..., : max(1, length // 8)]

    def refilled() -> Tensor:
        held = k.clone()
        compact.compact([held], gone, length)
        return held[:, :, : length - gone.shape[2]]

    return [
        (
            "observation scores",
            lambda: observe.observation_scores(q, k, at, held, softmax),
            2 * keys,
        ),
        (
            "decode attention",
            lambda: decode.decode_attention(one, k, v, None, softmax).out,
            2 * keys,
        ),
        ("farthest points", lambda: 1 + fps.farthest_points(q.float(), n // 2 or 1), 4 * q.numel()),
        ("redundancy", lambda: redundancy.key_redundancy(k, held), 2 * keys),
        ("compaction and a copy", refilled, 2 * keys),
        ("causal lse", lambda: causal.causal_lse(all_q, k, softmax), read),
        (
            "future mass",
            lambda: future.future_log_mass(all_q, k, lse, softmax, n).exp(),
            read,
        ),
    ]


def foresight(clock: Clock, dry: bool) -> Iterator[Row]:
    """The passes that make a training target, against causal attention on the same tokens."""
    length, heads, groups, d = (40, 1, 2, 32) if dry else (16384, 8, 4, 128)
    dtype = torch.float32 if dry else torch.bfloat16
    q = torch.randn(1, heads, groups, length, d, device=clock.device, dtype=dtype)
    k = torch.randn(1, heads, length, d, device=clock.device, dtype=dtype)
    flat, wide = q.flatten(1, 2), k.repeat_interleave(groups, dim=1)
    softmax = LogitTransform(d**-0.5)
    attend = torch.nn.functional.scaled_dot_product_attention
    attention = clock.ms(lambda: attend(flat, wide, wide, is_causal=True))
    with backend.backend("triton"):
        lse = causal.causal_lse(q, k, softmax)
        passes = {
            "causal lse": lambda: causal.causal_lse(q, k, softmax),
            "future mass": lambda: future.future_log_mass(q, k, lse, softmax, 16 if dry else 256),
        }
        for name, run in passes.items():
            ms = clock.ms(run)
            yield {
                "check": f"{name} of {length} tokens, {heads * groups} heads",
                "ok": dry or ms < 1.3 * attention,
                "ms": round(ms, 4),
                "of causal attention": round(ms / attention, 3),
            }


def _compared(
    clock: Clock, run: Callable[[], Tensor], moved: int, copied: float, dtype: torch.dtype
) -> Row:
    with backend.backend("triton"):
        ours = run()
        ms = clock.ms(run)
    with backend.backend("torch"):
        theirs = run()
        reference_ms = clock.ms(run)
    worst = ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()).item()
    speed = moved / ms / 1e6
    return {
        "ok": worst < (1e-4 if dtype == torch.float32 else 2e-2),
        "worst relative difference": worst,
        "ms": round(ms, 4),
        "x torch": round(reference_ms / ms, 2),
        "GB/s": round(speed, 1),
        "of copy": round(speed / copied, 3),
    }


def graphs(clock: Clock, dry: bool) -> Iterator[Row]:
    """Tokens of decode steps of fixed shapes against eager ones, and their speed."""
    model = _model("small", clock.device, torch.float32)
    new = 24 if dry else 512
    prompts = _prompts(model, 4 if dry else 16, 40)
    mode = "fixed" if dry else "graph"
    for policy in ("streaming", "beacon(n_beacon=4, n_recent=4)", "rkv", "h2o"):
        runs = {step: _timed(clock, model, prompts, policy, new, step) for step in ("eager", mode)}
        yield {
            "check": f"{mode} decoding, {policy}",
            "ok": runs["eager"][0] == runs[mode][0],
            "x eager": round(runs["eager"][1] / runs[mode][1], 2),
        }


def _timed(
    clock: Clock, model: Any, prompts: list[list[int]], policy: str, new: int, step: str
) -> tuple[list[list[int]], float]:
    from kvpolicies.decoding import generate

    clock.sync()
    begin = time.perf_counter()
    made = generate(model, prompts, policy, 64, max_new_tokens=new, eos_token_id=-1, step=step)
    clock.sync()
    return [g.tokens for g in made], time.perf_counter() - begin


def decoding(clock: Clock, dry: bool) -> Iterator[Row]:
    """Memory and tokens/s of Qwen3-4B's config with random weights."""
    from kvpolicies.eval.bench.run import measure
    from kvpolicies.models.memory import Load

    name, dtype = ("small", torch.float32) if dry else ("qwen3-4b", torch.bfloat16)
    model = _model(name, clock.device, dtype)
    new = 40 if dry else 2048
    cells = [("full", "1", 2 if dry else 14)]
    for budget in ("32",) if dry else ("1024", "2048"):
        for batch in (2,) if dry else (14, 64, 320):
            cells += [(p, budget, batch) for p in ("streaming", "rpc", "rkv", "beacon")]
    for policy, budget, batch in cells:
        label = f"{name} {policy} @ {budget}, batch {batch}, {new} tokens"
        if clock.left() < 60:
            yield {"check": label, "ok": None, "note": "no time left"}
            continue
        try:
            load = Load(batch, 16 if dry else 128, new)
            row = measure(model, policy, budget, load, repeats=1, with_split=False)
        except torch.OutOfMemoryError:
            yield {"check": label, "ok": None, "note": "out of memory"}
            torch.cuda.empty_cache()
            continue
        peak = row.peak_bytes
        yield {
            "check": label,
            "ok": peak is None or peak < 1.3 * row.predicted_bytes,
            "tokens/s": row.tokens_s,
            "predicted GB": round(row.predicted_bytes / 1e9, 2),
            "peak GB": None if peak is None else round(peak / 1e9, 2),
        }


def _model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    from kvpolicies.models.presets import preset

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(preset(name), dtype=dtype).eval()


def _prompts(model: Any, rows: int, length: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (rows, length), generator=g).tolist()


def main() -> int:
    """Runs all checks; exit status 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--seconds", type=float, default=460, help="time for all of it")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="JSON file")
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here: use --dry-run")
    if args.dry_run:
        mend_interpreter()
    clock = Clock(device, args.seconds)
    copied = copy_speed(clock, args.dry_run)
    about = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted"
    print(f"{about}: copy {copied:.0f} GB/s, {backend.described(device)}")
    rows: list[Row] = []
    with torch.no_grad():
        for part in (
            kernels(clock, args.dry_run, copied),
            foresight(clock, args.dry_run),
            scoring(clock, args.dry_run),
            training(clock, args.dry_run),
            graphs(clock, args.dry_run),
            decoding(clock, args.dry_run),
        ):
            for row in part:
                rows.append(row)
                shown = "  ".join(f"{k} {v}" for k, v in row.items() if k not in ("check", "ok"))
                state = {True: "ok   ", False: "WRONG", None: "-    "}[row["ok"]]
                print(f"{state} {row['check']:<70} {shown}", flush=True)
                record = {"device": about, "copy GB/s": copied, "rows": rows}
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["ok"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
