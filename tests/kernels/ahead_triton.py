"""Compiles every Triton kernel for GPUs that need not be here, and prints what each uses.

    python -m tests.kernels.ahead_triton [--json] [--quick | --all] [name ...]

One line a kernel, architecture and shape: registers a thread, spilled bytes, shared memory a
program. Head sizes are 64 and 128; --all: 32 to 256; --quick: 128, and only the newer GPU.
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


KERNELS = {"observe": observe}


def table(names: list[str], sizes: list[int], archs: list[int]) -> Iterator[tuple[str, Usage]]:
    """(shape, usage) of all that is asked for."""
    for name in names:
        for size, d in itertools.product(POINTERS, sizes):
            for case, arch in itertools.product(KERNELS[name](size, d), archs):
                kind = "bf16" if size == 2 else "float32"
                yield f"{kind}, D = {d}", measured(case, arch)


def main(argv: list[str]) -> None:
    """See the module's docstring."""
    warnings.simplefilter("ignore")
    names = [a for a in argv if not a.startswith("-")] or list(KERNELS)
    quick = "--quick" in argv
    sizes = [32, 64, 128, 256] if "--all" in argv else [128] if quick else [64, 128]
    rows = table(names, sizes, [90] if quick else [80, 90])
    if "--json" in argv:
        print(json.dumps([{"shape": shape} | asdict(usage) for shape, usage in rows]))
        return
    print(f"Triton {triton.__version__}")
    print("| kernel | shape | sm | registers | spilled | shared | warps |")
    print("|---|---|---|---|---|---|---|")
    for shape, u in rows:
        line = (u.name, shape, u.arch, u.registers, u.spilled, u.shared, u.warps)
        print("| " + " | ".join(map(str, line)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
