"""`kvpolicies serve`: an OpenAI-compatible server of a deployment."""

import argparse
import importlib.util
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kvpolicies.config import Deployment, from_args, read_yaml
from kvpolicies.config import add_arguments as add_options
from kvpolicies.errors import UserError
from kvpolicies.models import loading
from kvpolicies.options import check_options, option
from kvpolicies.positions import check_positions, reach
from kvpolicies.registry import resolve
from kvpolicies.serve.deployment import kernels

KEY = "KVPOLICIES_API_KEY"
NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus_client"}


@dataclass(frozen=True)
class Serving:
    """Where and how a deployment is served; what is served is the deployment's own affair."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "0 takes a free one")
    name: str = option("", "the model's name for clients; default: the deployment's model")
    queue: int = option(
        256, "most requests that wait for a row; more are refused with 429", least=0
    )
    grace: float = option(30.0, "seconds for running requests when the server is stopped", least=0)
    prefill_chunk: int = option(
        512,
        "most tokens of new prompts between two tokens of running answers (of policies that "
        "evict: a step of the budget each); 0: whole prompts",
        least=0,
    )
    max_body: int = option(1 << 20, "most bytes of a request's body", least=1)
    max_chars: int = option(
        0,
        "most characters of a prompt, checked before it is tokenised; 0: 16 a token of max_length",
        least=0,
    )
    clamp: bool = option(
        False,
        "true: lower a max_tokens that is more than there is room for, instead of refusing it",
    )
    api_key: str = option("", f"what clients must send as their API key; better as {KEY} in the "
                          "environment, where other users do not see it")  # fmt: skip
    cors_origins: tuple[str, ...] = option(
        (), "origins whose pages may ask, such as https://chat.example.com; * for all"
    )
    allow_hosts: tuple[str, ...] = option(
        (), "names by which clients may call this server, beside its addresses, localhost, --host "
        "and the machine's own; * for any"
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config file, its overrides, and where to listen."""
    parser.add_argument("config", nargs="?", help="deployment YAML; options below override it")
    add_options(parser, Deployment)
    add_options(parser, Serving)
    parser.epilog = (
        "example:\n  kvpolicies serve deploy.yaml --port 8000\n"
        "  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\\n"
        '      -d \'{"prompt": "Is 91 prime?", "max_tokens": 64}\'\n\n'
        "SIGTERM or Ctrl-C ends it: running requests are finished first (--grace)."
    )


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to stop; what cannot work is refused before the model is loaded."""
    values = read_yaml(args.config) if args.config else None
    config = from_args(Deployment, args, values, args.config or "")
    serving = from_args(Serving, args)
    _check(config)
    from kvpolicies.serve.running import address, is_loopback, listen
    from kvpolicies.serve.running import run as run_server

    serving = replace(serving, name=serving.name or config.model, api_key=_key(serving))
    with listen(serving.host, serving.port) as sock, ExitStack() as stack:
        access = _access(serving, is_loopback(sock))
        encoder, engine = _loaded(config, serving, stack)
        print(f"kvpolicies: serving {_described(config, engine)} on {address(sock)}", flush=True)
        return run_server(
            lambda: _served(config, serving, access, encoder, engine), sock, serving.grace
        )


def _check(config: Deployment) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}: pip install 'kvpolicies[serve]'")
    loading.check_name(config.model)
    loading.check_device(config.device)
    from kvpolicies.policy import check_deployable  # and torch

    policy = resolve(config.policy)
    check_deployable(policy)
    if policy.made_for not in (None, config.model):
        made = f"model {policy.made_for}" if policy.made_for else "no model: it lacks an option"
        raise UserError(f"policy {policy} is made for {made}, not for {config.model}")


def _key(serving: Serving) -> str:
    if serving.api_key or KEY not in os.environ:
        return serving.api_key
    if not os.environ[KEY].strip():
        raise UserError(f"{KEY} is empty: unset it, or set it to the API key")
    return os.environ[KEY]


def _access(serving: Serving, loopback: bool) -> Any:
    from kvpolicies.serve.guard import Access

    names = [serving.host, *serving.allow_hosts]
    if not loopback:
        names.append(socket.gethostname())
    hosts = frozenset(name.lower().rstrip(".") for name in names)
    access = Access(loopback, serving.api_key, hosts, serving.cors_origins)
    if not loopback and not serving.api_key:
        print(f"kvpolicies: whoever reaches {serving.host} can use this server; --api-key asks for "
              "a key", file=sys.stderr)  # fmt: skip
    return access


def _loaded(config: Deployment, own: Serving, stack: ExitStack) -> tuple[Any, Any]:
    """(encoder of prompts, engine, which holds the cache until the stack is closed)."""
    from kvpolicies.serve.prompts import Encoder, Lengths
    from kvpolicies.serving import serving

    model, tokenizer = loading.load(config.model, config.dtype, config.device)
    length, words = _max_length(config, model), model.get_input_embeddings().weight.shape[0]
    lengths = Lengths(length, config.max_new_tokens, own.max_chars, own.clamp)
    encoder = Encoder(tokenizer, words, lengths, config)
    stack.enter_context(kernels(config.kernels, model))
    engine = serving(
        model, config.policy, config.budget_spec, rows=config.batch_size,
        max_length=length, eos_token_id=loading.stop_tokens(model, tokenizer),
        step=config.step, prefill_chunk=own.prefill_chunk or None,
    )  # fmt: skip
    return encoder, stack.enter_context(engine)


def _max_length(config: Deployment, model: Any) -> int:
    length = reach(model.config).own
    if config.max_length is not None:
        check_positions(model, config.max_length, what="max_length")
        return config.max_length
    if not length:
        raise UserError(f"model {config.model} names no length of its own; give --max-length")
    return length


def _described(config: Deployment, engine: Any) -> str:
    budget = "all tokens" if not engine.policy.evicts else f"budget {config.budget}"
    size = f"{engine.cache_bytes():,} bytes"
    return (
        f"{config.model}, policy {engine.policy}, {budget}, {engine.rows} rows of up to "
        f"{engine.max_length} tokens, cache {size} and {engine.state_bytes():,} of state,"
    )


def _served(config: Deployment, own: Serving, access: Any, encoder: Any, engine: Any) -> Any:
    from kvpolicies.sampling import Sampling
    from kvpolicies.serve.app import Served
    from kvpolicies.serve.metrics import Metrics
    from kvpolicies.serve.service import Service

    return Served(
        service=Service(engine, Metrics(), own.queue),
        encoder=encoder,
        access=access,
        model=own.name,
        policy=str(engine.policy),
        sampling=Sampling(config.temperature, config.top_p, config.top_k),
        max_body=own.max_body,
    )
