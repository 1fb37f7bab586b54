"""A deployment as arguments of vLLM: of its `LLM` class, and of its command line."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from kvpolicies.config import Deployment
from kvpolicies.errors import UserError
from kvpolicies.models import embedded, loading
from kvpolicies.models.memory import meta_model
from kvpolicies.policy import Policy
from kvpolicies.positions import reach
from kvpolicies.registry import resolve
from kvpolicies.vllm.refusals import check_budget, check_form, check_model, check_policy
from kvpolicies.vllm.terms import Terms


def check(config: Deployment, parts: int = 1) -> tuple[Policy, Any]:
    """(policy, the model's config) of a deployment that vLLM can run.

    Args:
        parts: tensor parallel processes.

    Raises:
        UserError: for what cannot work, by name, before vLLM is started.
    """
    import torch

    policy = resolve(config.policy)
    check_policy(policy, config.model)
    check_budget(config.budget_spec, policy)
    check_form(config)
    if config.model == "smollm2" or "gguf" in (config.model[:4], config.model[-4:]):
        raise UserError(f"model {config.model}: give vLLM a folder or a hub id, no GGUF file")
    found = loading.load_config(config.model)
    check_model(meta_model(found, getattr(torch, config.dtype)), policy, parts)
    return policy, found


def terms_of(config: Deployment, found: Any) -> Terms:
    """What the deployment asks of vLLM's workers.

    Raises:
        UserError: if nothing says how long a sequence may be, or the budget is impossible.
    """
    length = config.max_length or reach(found).own
    if not length:
        raise UserError(f"model {config.model} names no length of its own; give --max-length")
    spec = config.budget_spec
    sinks = None if isinstance(spec.sinks, str) else spec.sinks
    terms = Terms(str(resolve(config.policy)), spec.text, sinks, spec.window, length)
    terms.schedule()
    return terms


def engine_arguments(config: Deployment, terms: Terms, policy: Policy) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; `command_line` makes options of them."""
    given: dict[str, Any] = {
        "model": model_path(config.model),
        "dtype": config.dtype,
        "max_model_len": terms.max_length,
        "max_num_seqs": config.batch_size,
        # A page a row, and vLLM's own: when all rows are busy they are neighbours, and one move.
        "num_gpu_blocks_override": config.batch_size + 1,
        "seed": config.seed,
        "attention_backend": "CUSTOM",
        "worker_cls": "kvpolicies.vllm.worker.SlotWorker",
        "logits_processors": ["kvpolicies.vllm.door:BudgetDoor"],
        "enable_prefix_caching": False,
        "additional_config": terms.mapping,
    }
    if policy.needs_input:
        given["enforce_eager"] = True
    return given


def server_arguments(config: Deployment) -> dict[str, Any]:
    """What the server adds: the model's name, and what a request gets that asks for nothing."""
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    given: dict[str, Any] = {
        "served_model_name": config.model,
        "override_generation_config": {**sampling, "max_new_tokens": config.max_new_tokens},
    }
    if config.thinking is not None:
        both = dict.fromkeys(("enable_thinking", "thinking"), config.thinking)
        given["default_chat_template_kwargs"] = both
    return given


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Options of vLLM's server: `{"max_num_seqs": 8}` is `--max-num-seqs 8`."""
    options: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            options += [f"--{flag}", *value]
        else:
            options += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return options


def model_path(name: str) -> str:
    """What vLLM loads: the package's own model by its folder, which stays."""
    if name != "embedded":
        return name
    with ExitStack() as stack:
        return str(stack.enter_context(embedded.assets()))
