"""`kvpolicies import`: published weights of a scorer, in this package's format.

    kvpolicies import trimkv weights/ --model Qwen/Qwen3-4B --out trimkv-4b
    kvpolicies generate "Is 91 prime?" --model Qwen/Qwen3-4B --policy "trimkv(scorer='trimkv-4b')"

Reads TRIM-KV's trimkv_weights.pth, the decision layers of NVIDIA's DMS models, KVzap's linear and
MLP maps, and Fast KVzip's gates, each from a folder or one of its files; nothing is downloaded.
"""

import argparse
from pathlib import Path

from kvpolicies.config import DTYPES
from kvpolicies.errors import UserError
from kvpolicies.models import loading

KINDS = ("trimkv", "dms", "kvzap", "fastkvzip")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The kind, the files, the base model, and where the scorer goes."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", help=f"whose weights: {', '.join(KINDS)}")
    parser.add_argument("folder", help="folder of the published files, or one file")
    parser.add_argument(
        "--model", required=True, help="the base model: a hub id, a folder, embedded, smollm2"
    )
    parser.add_argument("--out", required=True, help="folder of the scorer to write")
    parser.add_argument("--dtype", default="float32", help=f"of the model: {', '.join(DTYPES)}")


def run(args: argparse.Namespace) -> int:
    """Reads, checks, writes; prints how to use it. Returns the exit status."""
    folder, out = Path(args.folder).expanduser(), Path(args.out).expanduser()
    if not folder.exists():
        raise UserError(f"import {folder}: no such file or folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: is there already; name another folder")
    if args.dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {args.dtype!r}")
    loading.check_name(args.model)
    from kvpolicies.learned.importing import read_published

    model, _ = loading.load(args.model, args.dtype, "cpu")
    scorer = read_published(args.kind, folder, model)
    scorer.save_pretrained(out)
    numbers = sum(p.numel() for p in scorer.parameters())
    print(f"{args.kind}: {len(scorer.config.layers)} layers, {numbers:,} numbers: {out}")
    print(f"{args.kind}(scorer={str(out)!r})")
    return 0
