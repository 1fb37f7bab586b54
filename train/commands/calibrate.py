"""`kvpolicies calibrate`: statistics of a model's queries, which triattention scores by.

    kvpolicies calibrate --model smollm2 --data solutions.jsonl --out smollm2.safetensors
    kvpolicies generate "Is 91 prime?" --model smollm2 \\
        --policy "triattention(statistics='smollm2.safetensors')"

Each document is one dense forward of at most --length tokens: a minute for a small model on a CPU.
"""

import argparse
import time
from pathlib import Path

from kvpolicies import config
from kvpolicies.files import check_free
from kvpolicies.models import loading
from kvpolicies.train.calibration import Calibration
from kvpolicies.train.recipe import check_there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    config.add_arguments(parser, Calibration)
    parser.add_argument("--force", action="store_true", help="overwrite the file")


def run(args: argparse.Namespace) -> int:
    """Reads, runs, writes; prints how to use the file. Returns the exit status."""
    from kvpolicies.train import sources
    from kvpolicies.train.calibrate import calibrate, texts

    asked = config.from_args(Calibration, args)
    recipe, out = asked.data_of, Path(asked.out)
    check_there(recipe)
    loading.check_name(asked.model)
    loading.check_device(asked.device)
    check_free(out, "--out", args.force)
    begin, records = time.monotonic(), sources.find(recipe)
    model, tokenizer = loading.load(asked.model, asked.dtype, asked.device)
    documents = texts(asked, sources.open_source(recipe, records, tokenizer))
    found = calibrate(model, documents)
    found.save(out)
    seconds = time.monotonic() - begin
    print(f"{len(documents)} documents, {found.tokens:,} tokens, {seconds:.0f} s: {out}")
    print(f"triattention(statistics={str(out)!r})")
    return 0
