"""`kvpolicies replay`: does a trace explain the logits that were decoded under it?"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicies.errors import UserError
from kvpolicies.files import check_readable
from kvpolicies.models import loading

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicies.trace import EvictionTrace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and the trace."""
    parser.add_argument("trace", help="a trace that `generate --trace DIR` wrote")
    parser.add_argument("--model", default="embedded", help="the model that made it")
    parser.epilog = (
        "example:\n  kvpolicies generate --model embedded --policy beacon --budget 133 \\\n"
        "      --prompt-file prompts.txt --trace traces\n"
        "  kvpolicies replay traces/0.safetensors --model embedded"
    )


def run(args: argparse.Namespace) -> int:
    """Prints whether greedy choices under the replayed mask are the trace's own tokens."""
    check_readable(args.trace, "eviction trace")
    loading.check_name(args.model)
    from kvpolicies.trace import EvictionTrace

    trace = EvictionTrace.load(Path(args.trace))
    from kvpolicies.positions import check_positions
    from kvpolicies.replaying import replay

    if (count := trace.tokens.shape[0]) != 1:
        raise UserError(f"{args.trace}: holds {count} sequences; `generate` writes one a file")
    model, _ = loading.load(args.model)
    layers, heads = trace.times.shape[1:3]
    config = model.config.get_text_config(decoder=True)
    if (layers, heads) != (config.num_hidden_layers, config.num_key_value_heads):
        raise UserError(
            f"{args.trace}: made by a model of {layers} layers and {heads} KV heads; {args.model} "
            f"has {config.num_hidden_layers} and {config.num_key_value_heads}"
        )
    check_positions(model, 1, trace.tokens.shape[1])
    logits = replay(model, trace)
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise UserError(f"{args.trace}: the logits of {args.model} are not finite on its tokens")
    length = trace.tokens.shape[1]
    kept = trace.cache_length(length - 1).float().mean().item()
    print(f"tokens {length}, slots held at the end {kept:.0f} of {length} (mean over heads)")
    print(f"{_agreement(trace, logits[0].argmax(-1).cpu())} greedy under the replayed mask")
    return 0


def _agreement(trace: "EvictionTrace", greedy: "Tensor") -> str:
    """How many of the new tokens are those that the logits [T, V] put first."""
    import torch

    said = trace.tokens[0, 1:]
    first, what = 1, "tokens are (a prompt's, which were given and not chosen, among them)"
    if trace.prompts is not None and trace.last is not None:
        said = torch.cat([said, trace.last])
        first, what = int(trace.prompts[0]), "new tokens are"
    same = (greedy[first - 1 : len(said)] == said[first - 1 :]).tolist()
    return f"{'all' if all(same) else f'{sum(same)} of'} {len(same)} {what}"
