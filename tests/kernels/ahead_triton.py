"""Compiles every Triton kernel for GPUs that need not be here, and prints what each uses.

    python -m tests.kernels.ahead_triton [--json] [--quick | --all] [name ...]

One line a kernel, architecture and shape: registers a thread, spilled bytes, shared memory a
program. Exits with 1 if anything spills. Head sizes are 64 and 128; --all: 32 to 256; --quick: 128,
bf16 for the newer GPU and float32 for the older.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {2: "*bf16", 4: "*fp32"}


@dataclass(frozen=True)
class Case:
    """One kernel and the types and constants it is compiled for."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Of arguments that are not int32; pointers and strides are taken to be multiples of 16."""
    constants: dict[str, Any]
    warps: int = 4


@dataclass(frozen=True)
class Usage:
    """What the assembler said."""

    name: str
    arch: int
    registers: int
    spilled: int
    """Bytes of stack a thread: what did not find a register."""
    shared: int
    warps: int


def measured(case: Case, arch: int) -> Usage:
    """Compiles down to machine code."""
    names = case.kernel.arg_names
    signature = {n: "constexpr" if n in case.constants else case.types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n.startswith("s_")
    }
    source = ASTSource(case.kernel, signature, case.constants, aligned)
    done = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": case.warps}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(done.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    used = dict(re.findall(r"(REG|STACK):(\d+)", said))
    return Usage(
        case.name, arch, int(used["REG"]), int(used["STACK"]), done.metadata.shared, case.warps
    )


def observe(size: int, d: int) -> Iterator[Case]:
    """Observation scores: G = 4, N = 32."""
    from kvpolicies.kernels import observe as module

    types = dict.fromkeys(("p_top", "p_total", "p_sink", "p_out"), "*fp32")
    types |= {"p_when": "*i64", "p_at": "*i32", "p_valid": "*i1", "scale": "fp32", "cap": "fp32"}
    for query, merged in [(size, False), (size, True), (4, False)][: 3 if size == 2 else 2]:
        rows, slots, warps = module.BLOCKS[query, size, max(64, d)]
        its = types | {"p_q": POINTERS[query], "p_k": POINTERS[size]}
        shared = {"D": d, "BLOCK_D": max(16, d), "BLOCK_R": rows, "BLOCK_L": slots}
        shared |= {"MERGED": merged, "CAPPED": not merged, "HAS_VALID": True}
        kind = "".join([", merged" * merged, ", float32 queries" * (query > size)])
        yield Case(f"observe lse{kind}", module._lse_kernel, its, shared, warps)
        pool = shared | {"HAS_SINK": not merged, "LARGEST": True}
        yield Case(f"observe pool{kind}", module._pool_kernel, its, pool, warps)


def decode(size: int, d: int) -> Iterator[Case]:
    """Attention of one query a head, with all that can be asked for."""
    from kvpolicies.kernels import decode as module

    slots, warps = module.BLOCKS[size, max(64, d)]
    names = ("p_top", "p_total", "p_part", "p_row", "p_lse", "p_sink")
    types = dict.fromkeys(names, "*fp32") | {"p_length": "*i32", "p_first": "*i64"}
    types |= dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), POINTERS[size])
    types |= {"p_at": "*i32", "scale": "fp32", "cap": "fp32"}
    shared = {"D": d, "BLOCK_G": 16, "BLOCK_D": max(16, d), "BLOCK_L": slots, "HAS_LENGTHS": True}
    for row in (False, True):
        kind = ", weights" * row
        part = shared | {"CAPPED": row, "HAS_FIRST": row, "HAS_ROW": row}
        yield Case(f"decode part{kind}", module._part_kernel, types, part, warps)
        join = shared | {"HAS_ROW": row, "HAS_SINK": True}
        yield Case(f"decode join{kind}", module._join_kernel, types, join)


def fps(size: int, d: int) -> Iterator[Case]:
    """Farthest points of a buffer and of a prompt."""
    from kvpolicies.kernels import fps as module

    types = {"p_q": POINTERS[size], "p_highest": "*fp32", "p_out": "*i64"}
    tile, warps = module.TILE_FEW
    few = {"BLOCK_N": 64, "BLOCK_D": tile // 64, "EPS": module.EPS}
    yield Case("fps, 64 queries", module._few_kernel, types, few, warps)
    tile, warps = module.TILE_MANY
    many = {"BLOCK_N": tile // d, "BLOCK_D": d, "EPS": module.EPS}
    yield Case("fps, a prompt", module._many_kernel, types, many, warps)


def redundancy(size: int, d: int) -> Iterator[Case]:
    """R-KV's redundancy."""
    from kvpolicies.kernels import redundancy as module

    block, warps = module.BLOCKS[size, max(64, d)]
    types = {"p_k": POINTERS[size], "p_norm": "*fp32", "p_total": "*fp32", "threshold": "fp32"}
    types |= {"p_at": "*i32", "p_cut": "*i32"}
    constants = {"D": d, "BLOCK_D": max(16, d), "BLOCK": block}
    yield Case("redundancy cut", module._cut_kernel, types, constants, warps)
    yield Case("redundancy sum", module._sum_kernel, types, constants, warps)


def compact(size: int, d: int) -> Iterator[Case]:
    """Hole filling: the plan, and moves of keys or values."""
    from kvpolicies.kernels import compact as module

    types = dict.fromkeys(("p_victim", "p_source", "p_destination"), "*i64")
    types |= {"p_x": POINTERS[size]}
    yield Case("compact plan", module._plan_kernel, types, {"BLOCK": module.PLAN})
    constants = {"BLOCK": module.MOVE // d, "BLOCK_W": d}
    yield Case("compact move", module._move_kernel, types, constants)


def causal(size: int, d: int) -> Iterator[Case]:
    """The log-sum-exp of each query, plain and with all that can be asked for."""
    from kvpolicies.kernels import causal as module

    types = {"p_q": POINTERS[size], "p_k": POINTERS[size], "p_start": "*i32"}
    types |= {"p_expires": "*i32"}
    more = ("HAS_SINK", "HAS_EXPIRES")
    yield from _streamed("causal lse", module, module._lse_kernel, types, size, d, *more)


def future(size: int, d: int) -> Iterator[Case]:
    """Future attention mass, plain and with all that can be asked for."""
    from kvpolicies.kernels import future as module

    types = {"p_q": POINTERS[size], "p_k": POINTERS[size], "p_lse": "*fp32", "p_end": "*i32"}
    yield from _streamed("future mass", module, module._mass_kernel, types, size, d)


def _streamed(
    name: str, module: Any, kernel: Any, types: dict[str, str], size: int, d: int, *more: str
) -> Iterator[Case]:
    rows, columns, warps = module.BLOCKS[size, max(64, d)]
    types = types | dict.fromkeys(("p_sink", "p_out"), "*fp32") | {"scale": "fp32", "cap": "fp32"}
    sizes = {"D": d, "BLOCK_D": max(16, d), "BLOCK_R": rows, "BLOCK_C": columns}
    for asked in (False, True):
        constants = sizes | dict.fromkeys(("CAPPED", "HAS_DOCUMENTS", *more), asked)
        yield Case(name + ", all options" * asked, kernel, types, constants, warps)


def retention(size: int, d: int) -> Iterator[Case]:
    """Boundaries by a Fenwick tree; neither size plays a part."""
    from kvpolicies.kernels import retention as module

    types = dict.fromkeys(("p_rank", "p_last", "p_tree", "p_kth"), "*i32")
    yield Case("retention", module._fenwick_kernel, {**types}, {"LANES": 32}, 1)


KERNELS = {
    "observe": observe,
    "decode": decode,
    "fps": fps,
    "redundancy": redundancy,
    "compact": compact,
    "retention": retention,
    "causal": causal,
    "future": future,
}


def table(names: list[str], flags: list[str]) -> Iterator[tuple[str, Usage]]:
    """(shape, usage) of all that is asked for."""
    quick = "--quick" in flags
    sizes = [32, 64, 128, 256] if "--all" in flags else [128] if quick else [64, 128]
    for name, size, d in itertools.product(names, POINTERS, sizes):
        archs = [90 if size == 2 else 80] if quick else [80, 90]
        for case, arch in itertools.product(KERNELS[name](size, d), archs):
            yield f"{'bf16' if size == 2 else 'float32'}, D = {d}", measured(case, arch)


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    warnings.simplefilter("ignore")
    flags = [a for a in argv if a.startswith("-")]
    rows = table([a for a in argv if a not in flags] or list(KERNELS), flags)
    if "--json" in flags:
        print(json.dumps([{"shape": shape} | asdict(usage) for shape, usage in rows]))
        return 0
    print(f"Triton {triton.__version__}")
    print("| kernel | shape | sm | registers | spilled | shared | warps |")
    print("|---|---|---|---|---|---|---|")
    spilled = 0
    for shape, u in rows:
        line = (u.name, shape, u.arch, u.registers, u.spilled, u.shared, u.warps)
        print("| " + " | ".join(map(str, line)) + " |", flush=True)
        spilled += u.spilled
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
