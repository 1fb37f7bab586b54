"""`kvpolicies bench`: speed and memory of policies on any model, random weights included.

    kvpolicies bench                                       a small Qwen3, three policies
    kvpolicies bench --random qwen3-4b --memory 80GB --predict-only
    kvpolicies bench --model smollm2 --policies beacon,rkv --budgets 256 --batch-sizes 1,4
    kvpolicies bench deploy.yaml                           what `select` wrote, as it would run
    kvpolicies bench --requests 64 --tail 50:2000 --batch-sizes 16 --policies streaming

Rows are written as they are measured; the same command again measures what is missing.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicies import room
from kvpolicies.config import DTYPES, MODES, split_list
from kvpolicies.errors import UserError
from kvpolicies.eval.bench.options import budgets_of, numbers, settled, sinks, whole_number
from kvpolicies.eval.bench.table import print_table, read_rows, write_csv
from kvpolicies.eval.display.bytesize import parse_bytes
from kvpolicies.eval.study.provenance import check_makeable
from kvpolicies.eval.study.results import open_whole
from kvpolicies.files import make_folder, naming, read_json, write_json

if TYPE_CHECKING:
    from kvpolicies.budget import BudgetSpec

RESULTS, RUN, TABLE = "bench.jsonl", "run.json", "bench.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run, under which policies, and where results go."""
    add = parser.add_argument
    add("config", nargs="?", help="deployment YAML; options below override it")
    add("--model", help="a model with weights (as in compare); default: --random small")
    add("--random", metavar="NAME|FILE", help="random weights: small, qwen3-0.6b, qwen3-4b, "
        "qwen3-8b, qwen3-14b, or a config.json")  # fmt: skip
    add("--policies", help="policies with options (transformers,full,streaming,beacon); "
        "`transformers` is its own full-cache generation")  # fmt: skip
    add("--budgets", help="slots, or shares of prompt + new tokens (25%%); default: 512")
    add("--sinks", type=sinks, help="first tokens that are never evicted, or prompt; default: 4")
    add("--window", type=whole_number, help="newest tokens that are never evicted; default: 32, or "
        "budget/4")  # fmt: skip
    add("--batch-sizes", help="rows decoded at once; default: 8")
    add("--prompt", type=whole_number, default=64, help="tokens of each prompt; default: 64")
    add("--new", type=whole_number, help="new tokens a row; default: 1024")
    add("--repeats", type=whole_number, default=2, help="runs a figure; the fastest windows count")
    add("--dtype", help=f"{DTYPES[0]} (default), {', '.join(DTYPES[1:])}")
    add("--device", help="auto (default), cpu, cuda")
    add("--memory", default="80GB", help="memory to fill when asking for the largest batch; "
        "default: 80GB")  # fmt: skip
    add("--step", help="how decode steps run: auto (default), eager, fixed, graph, compiled")
    add("--requests", type=whole_number, metavar="N", help="instead: N requests in a queue, "
        "finished rows replaced, against static batches")  # fmt: skip
    add("--tail", help="their shortest and longest number of new tokens; default: 50:2000")
    add("--no-split", action="store_true", help="leave out where a step's time goes")
    add("--predict-only", action="store_true", help="memory by arithmetic; nothing is run")
    add("--out", default="results/bench", help="folder for bench.csv, bench.jsonl, run.json, plots")
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(args: argparse.Namespace) -> int:
    """Measures what is missing, writes and prints the table."""
    from kvpolicies.eval.study import locks as claims

    args = settled(args)
    policies, budgets = split_list(args.policies), budgets_of(args)
    sizes = numbers(args.batch_sizes, "--batch-sizes")
    for name in ("prompt", "new", "repeats"):
        if getattr(args, name) < (3 if name == "new" else 1):
            raise UserError(f"--{name} {getattr(args, name)}: too small")
    memory = parse_bytes(args.memory)
    tokens = max(sizes) * (args.prompt + args.new) * args.repeats
    room.check(tokens * room.ENTRY, f"{tokens:,} tokens", "lower --new, --batch-sizes or --repeats")
    _check(args, policies, budgets)
    out = Path(args.out)
    if not args.predict_only:
        check_makeable(out)
        _asked(out, args)
        claims.check_free(out)
    _check_values(policies)
    from kvpolicies.models.memory import Load

    loads = [Load(size, args.prompt, args.new) for size in sizes]
    if args.predict_only:
        print_table(_predicted(args, policies, budgets, loads, memory))
        return 0
    kind, run_cell = _measuring(args, memory) if args.requests is None else _serving(args, policies)
    model = _model(args)
    make_folder(out, "--out")
    with claims.alone(out):
        rows = _measured(
            out, _asked(out, args), kind, partial(run_cell, model), _cells(policies, budgets, loads)
        )
        flat = [row.flat() for row in rows]
        write_csv(out / TABLE, flat)
        if args.requests is None:
            _plots(out, rows, model, budgets[0])
    print_table(flat)
    print(f"\n{len(flat)} rows. Table: {out / TABLE}")
    return 0


def _measured(
    out: Path, asked: dict[str, Any], kind: Any, run_cell: Callable[..., Any], todo: Any
) -> list[Any]:
    """A row a cell: those that the folder holds, and those that are missing, measured now."""
    from kvpolicies.eval.study.provenance import environment

    if not (out / RUN).exists():
        write_json(out / RUN, {"bench": asked, "environment": environment()})
    rows = read_rows(out / RESULTS, kind)
    done = {(row.policy, row.budget, row.batch) for row in rows}
    with open_whole(out / RESULTS) as file:
        for policy, budget, load in todo:
            shown = "" if policy in ("full", "transformers") else budget.text
            if (policy, shown, load.batch) in done:
                continue
            row = run_cell(policy, budget, load)
            with naming(out / RESULTS, doing="cannot be written: "):
                file.write(json.dumps(asdict(row)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            rows.append(row)
    return rows


def _measuring(args: argparse.Namespace, memory: int) -> tuple[Any, Callable[..., Any]]:
    """What a cell's row is, and how it is measured: rows that all run to the end."""
    from kvpolicies.eval.bench.run import BenchRow, measure

    split = not args.no_split
    given = {"repeats": args.repeats, "step": args.step, "with_split": split, "memory": memory}
    return BenchRow, partial(measure, **given)


def _serving(args: argparse.Namespace, policies: list[str]) -> tuple[Any, Callable[..., Any]]:
    """Measures requests of many lengths, served both ways."""
    from rich import print as say

    from kvpolicies.eval.bench.replacement import Queue, Throughput, parse_tail, serve

    if args.requests < 1 or "transformers" in policies:
        raise UserError("--requests: needs at least one, and policies of ours alone")
    args.tail = args.tail or "50:2000"
    low, high = parse_tail(args.tail)

    def run_cell(model: Any, policy: str, budget: "BudgetSpec", load: Any) -> Any:
        queue = Queue(args.requests, low, high, args.prompt, load.batch)
        return serve(model, policy, budget, queue, args.step, say)

    return Throughput, run_cell


def _cells(policies: list[str], budgets: "list[BudgetSpec]", loads: list[Any]) -> Any:
    for load in loads:
        for policy in policies:
            for budget in budgets[:1] if policy in ("full", "transformers") else budgets:
                yield policy, budget, load


def _check(args: argparse.Namespace, policies: list[str], budgets: "list[BudgetSpec]") -> None:
    """Refuses what cannot run, before anything is loaded or written."""
    from kvpolicies.models import loading, presets
    from kvpolicies.registry import check

    if args.tail is not None and args.requests is None:
        raise UserError(f"--tail {args.tail}: needs --requests N, whose lengths it gives")
    if args.dtype not in DTYPES:
        raise UserError(f"--dtype {args.dtype!r}: expected {', '.join(DTYPES)}")
    loading.check_device(args.device)
    if args.step not in ("auto", *MODES):
        raise UserError(f"--step {args.step!r}: expected auto, {', '.join(MODES)}")
    if not policies:
        raise UserError("--policies: none given")
    for budget in budgets:
        budget.of(args.prompt + args.new)
    for policy in policies:
        if policy != "transformers":
            check(policy)
    if args.model and args.random:
        raise UserError("give --model or --random, not both")
    if args.model:
        loading.check_name(args.model)
    elif args.random and args.random.endswith(".json"):
        loading.check_config(args.random, "--random")
    elif args.random:
        presets.check(args.random)


def _check_values(policies: list[str]) -> None:
    """Checks policies, as far as their classes are needed for it."""
    from kvpolicies.registry import resolve

    for policy in policies:
        if policy != "transformers" and resolve(policy).needs_future:
            raise UserError(f"policy {policy} cannot be deployed, so it has no speed to measure")


def _config(args: argparse.Namespace) -> Any:
    from kvpolicies.models.presets import preset

    name = args.random or "small"
    if not name.endswith(".json"):
        return preset(name)
    from transformers import AutoConfig

    from kvpolicies.models import weights

    try:
        with weights.quiet():
            return AutoConfig.from_pretrained(name)
    except Exception as error:  # transformers raises what it likes
        raise UserError(f"--random {name}: no model config: {weights.reason(error)}") from None


def _model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from kvpolicies.models import loading, weights

    if args.model:
        return loading.load(args.model, args.dtype, args.device)[0]
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = _config(args)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    except Exception as error:  # torch and transformers raise what they like
        why = weights.reason(error)
        raise UserError(f"--random on {device}: no model can be made: {why}") from error
    return model.eval()


def _predicted(
    args: argparse.Namespace,
    policies: list[str],
    budgets: "list[BudgetSpec]",
    loads: list[Any],
    memory: int,
) -> list[dict[str, Any]]:
    import torch

    from kvpolicies.models.memory import largest_batch, meta_model, predict

    dtype = getattr(torch, args.dtype)
    model = _model(args) if args.model else meta_model(_config(args), dtype)
    rows = []
    for policy, budget, load in _cells(policies, budgets, loads):
        name = "full" if policy == "transformers" else policy
        held = predict(model, name, budget, load.batch, load.prompt, load.new)
        values = {"policy": policy, "budget": budget.text, **asdict(held), "total": held.total}
        rows.append({**values, "fits": largest_batch(held, memory)})
    return rows


def _asked(out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What all rows of a folder share; a folder that holds another bench is refused."""
    keys = ("model", "random", "sinks", "window", "prompt", "new", "repeats", "step", "requests",
            "tail", "dtype", "device", "memory", "no_split")  # fmt: skip
    asked = {key: getattr(args, key) for key in keys}
    if (out / RUN).exists():
        known = read_json(out / RUN)
        before = known.get("bench") if isinstance(known, dict) else None
        if not isinstance(before, dict):
            raise UserError(f"--out {out}: {RUN} is no bench's; choose another folder")
        other = [f"{k} {before.get(k)}, not {v}" for k, v in asked.items() if before.get(k) != v]
        if other:
            raise UserError(
                f"--out {out}: holds another bench ({'; '.join(other)}); choose another folder"
            )
    return asked


def _plots(out: Path, rows: list[Any], model: Any, like: "BudgetSpec") -> None:
    from kvpolicies.eval.bench.plots import memory_against_length, throughput_against_batch

    throughput_against_batch(out / "throughput.png", rows)
    memory_against_length(out / "memory.png", rows, model, like)
