"""`kvpolicies generate`: text from prompts, under a deployment config."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvpolicies.config import Deployment, from_args, read_yaml
from kvpolicies.config import add_arguments as add_options
from kvpolicies.errors import UserError, cut, shown
from kvpolicies.eval.study.provenance import check_makeable
from kvpolicies.files import make_folder, parse_lines, read_lines
from kvpolicies.models import loading
from kvpolicies.models.form import RAW
from kvpolicies.models.prompts import Prompts, user
from kvpolicies.models.tokens import some, unknown
from kvpolicies.registry import resolve
from kvpolicies.serve.deployment import kernels
from kvpolicies.streams import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config file, its overrides, and where prompts come from."""
    parser.add_argument("config", nargs="?", help="deployment YAML; options below override it")
    add_options(parser, Deployment)
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompt-file", help="a file with one prompt a line, - for standard input")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="prompts are rendered already: no template, no wrapper, special tokens read as such",
    )
    parser.add_argument("--trace", metavar="DIR", help="write eviction traces, one file a prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    parser.epilog = (
        "example:\n  kvpolicies generate --model smollm2 --policy beacon --budget 256 \\\n"
        "      --prompt 'What is 6 * 7?' --max-new-tokens 64"
    )


def run(args: argparse.Namespace) -> int:
    """Prints one text a prompt."""
    values = read_yaml(args.config) if args.config else None
    config = from_args(Deployment, args, values, args.config or "")
    texts = _prompts(args)
    if args.trace:
        check_makeable(Path(args.trace), "--trace")
    loading.check_name(config.model)
    loading.check_device(config.device)
    resolve(config.policy)  # torch is imported from here on
    for text, ids, generation, tokenizer in _generations(config, texts, args):
        answer = tokenizer.decode(generation.tokens, skip_special_tokens=True)
        if args.json:
            print(json.dumps(_record(text, ids, answer, generation), ensure_ascii=False))
        else:
            print(answer)
        if args.trace:
            folder = make_folder(args.trace, "--trace")
            generation.trace.save(folder / f"{generation.request}.safetensors")
    return 0


def _generations(config: Deployment, texts: list[str], args: argparse.Namespace) -> Any:
    from kvpolicies.decoding import generate

    model, tokenizer = loading.load(config.model, config.dtype, config.device)
    prompts = _encoded(Prompts(tokenizer, RAW if args.raw else config), texts)
    with kernels(config.kernels, model):
        generations = generate(
            model,
            prompts,
            config.policy,
            config.budget_spec,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.batch_size,
            eos_token_id=loading.stop_tokens(model, tokenizer),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            trace=bool(args.trace),
            progress="prompts" if sys.stderr.isatty() else None,
            step=config.step,
        )
    every = zip(texts, prompts, generations, strict=True)
    return [(text, ids, made, tokenizer) for text, ids, made in every]


def _prompts(args: argparse.Namespace) -> list[str]:
    texts = list(args.prompt)
    if args.prompt_file == "-":
        texts += parse_lines(sys.stdin.read())
    elif args.prompt_file:
        texts += read_lines(args.prompt_file, "--prompt-file")
    if not texts:
        raise UserError(
            "no prompt: give --prompt TEXT, or --prompt-file FILE with one prompt a line"
        )
    return texts


def _encoded(prompts: Prompts, texts: list[str]) -> list[list[int]]:
    """The texts' tokens; words that the tokenizer does not know are told on stderr."""
    encoded = []
    for text in texts:
        encoded.append(prompts.prompt(user(text)))
        if not encoded[-1]:
            raise UserError(f"prompt {shown(text)} has no tokens; every prompt needs at least one")
        if lost := unknown(prompts.tokenizer, text):
            told = f"{len(lost)} words that the tokenizer does not know: {some(lost)}"
            say(f"prompt {cut(text, 60)!r} has {told}")
    return encoded


def _record(prompt: str, ids: list[int], answer: str, generation: Any) -> dict[str, Any]:
    keys = ("finish", "prompt_tokens", "max_slots", "cache_bytes", "state_bytes", "seconds")
    numbers = {key: getattr(generation, key) for key in keys}
    tokens = {"prompt_ids": ids, "ids": generation.tokens, "tokens": len(generation.tokens)}
    return {"prompt": prompt, "text": answer, **tokens, **numbers}
