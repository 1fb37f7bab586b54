"""What cannot work inside vLLM, each by name and in one line."""

from typing import Any

from kvpolicies.architecture import inspect_model
from kvpolicies.budget import BudgetSpec
from kvpolicies.config import Deployment
from kvpolicies.errors import UserError
from kvpolicies.layer_shares import EVEN
from kvpolicies.policy import Policy, check_deployable


def check_policy(policy: Policy, model: str = "", eager: bool = True) -> None:
    """Raises UserError for a policy that needs what vLLM's attention does not see.

    Args:
        model: the deployment's model; empty: not known. eager: whether modules run as they are.
    """
    check_deployable(policy)
    reason = ""
    if policy.rerotates:
        reason = "it keeps keys before RoPE, and vLLM rotates them before attention"
    elif policy.needs_output:
        reason = "it reads the attention's output projection, which vLLM packs away"
    elif policy.own_rule:
        reason = "a paper's own rule (faithful=True) holds more than the budget that pages have"
    elif policy.needs_input and not eager:
        reason = "it reads the attention's input, which takes --enforce-eager"
    if reason:
        raise UserError(f"policy {policy} does not run inside vLLM: {reason}")
    if model and policy.made_for not in (None, model):
        made = f"model {policy.made_for}" if policy.made_for else "no model: it lacks an option"
        raise UserError(f"policy {policy} is made for {made}, not for {model}")


def check_budget(spec: BudgetSpec, policy: Policy) -> None:
    """Raises UserError for a budget that depends on a request or a layer, for all pages are of one
    size."""
    if not policy.evicts:
        return
    if spec.stored != "auto":
        raise UserError(
            f"kv_dtype {spec.stored}: pages inside vLLM hold keys and values in the model's own "
            "dtype; use kv_dtype: auto, or kvpolicies serve"
        )
    if spec.sharing != EVEN:
        raise UserError(
            f"layers {spec.sharing}: vLLM's pages are of one size in every layer; use layers: even"
        )
    if spec.is_share:
        raise UserError(
            f"budget {spec}: vLLM's pages are of one size; name slots, and let a request ask for "
            "fewer (vllm_xargs: kv_budget)"
        )
    if isinstance(spec.sinks, str):
        raise UserError(
            f"sinks {spec.sinks}: a prompt that fills the budget could not be refused once vLLM "
            "runs it; name a number of sinks"
        )


def check_model(model: Any, policy: Policy, parts: int = 1) -> None:
    """Raises UserError for an architecture that cannot be evicted, or not in so many parts.

    Args:
        model: a transformers model; one without storage will do. parts: tensor parallel processes.
    """
    shape = inspect_model(model, policy)
    name = type(model).__name__
    if any(span is not None for span in shape.spans):
        raise UserError(f"model {name}: layers with a sliding window are not served inside vLLM")
    if parts > 1 and policy.mixes_heads:
        raise UserError(
            f"policy {policy} scores a layer's KV heads together, and tensor parallelism spreads "
            f"them over {parts} processes: use --tensor-parallel-size 1"
        )
    if shape.heads % parts:
        raise UserError(
            f"model {name}: {shape.heads} KV heads cannot be spread evenly over {parts} processes"
        )
    policy.check_model(model)


def check_vllm(config: Any) -> None:
    """Raises UserError for a vLLM configuration that would break the budget or the pages."""
    cache, parallel, model = config.cache_config, config.parallel_config, config.model_config
    reason = ""
    if cache.enable_prefix_caching:
        reason = "prefix caching shares keys that each request evicts on its own"
        reason += "; use --no-enable-prefix-caching"
    elif config.speculative_config is not None:
        reason = "speculative decoding takes tokens back, and an eviction cannot be taken back"
    elif config.kv_transfer_config is not None:
        reason = "KV connectors move blocks of tokens, and a page has none"
    elif model.use_mla:
        reason = "multi-head latent attention (MLA) caches no keys and values per head"
    elif str(cache.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch.")):
        reason = f"kv_cache_dtype {cache.cache_dtype}: pages hold the model's own dtype"
    elif config.use_v2_model_runner:
        reason = "its V2 model runner keeps counts on the device; set VLLM_USE_V2_MODEL_RUNNER=0"
    elif parallel.pipeline_parallel_size > 1:
        reason = "pipeline parallelism has not been tried; use --tensor-parallel-size"
    elif getattr(parallel, "decode_context_parallel_size", 1) > 1:
        reason = "decode context parallelism cuts a head's tokens among processes"
    elif parallel.enable_dbo:
        reason = "dual-batch overlap runs two halves of a step at once"
    if reason:
        raise UserError(f"kvpolicies inside vLLM: {reason}")


def check_form(config: Deployment) -> None:
    """Raises UserError for a rendering that vLLM's server cannot be told."""
    if config.wrapper:
        raise UserError(
            "wrapper: vLLM's server renders conversations by the chat template alone; put it into "
            "the template, or use kvpolicies serve"
        )
