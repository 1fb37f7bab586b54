"""What the parts of one worker's process share; vLLM runs one worker a process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpolicies.architecture import find_ropes
from kvpolicies.budget import BudgetSpec
from kvpolicies.cache import WEIGHTS_A_ROW
from kvpolicies.errors import UserError
from kvpolicies.models.memory import meta_model
from kvpolicies.policy import Geometry, Policy, Schedule
from kvpolicies.rope import Rope
from kvpolicies.vllm.planning import Planner, Told
from kvpolicies.vllm.refusals import check_budget, check_model, check_policy, check_vllm
from kvpolicies.vllm.terms import Terms


@dataclass
class WorkerSession:
    """A worker's policy, its schedule, and who holds which page."""

    terms: Terms
    policy: Policy
    schedule: Schedule
    """Of a request that asks for no budget of its own."""
    ropes: list[Rope]
    """By layer."""
    first_part: int
    """Number of this process among those that share the KV heads."""
    told: dict[int, Told] = field(default_factory=dict)
    """By page."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """By layer, the attention's input [N, E] of the forward under way, where a policy reads it."""
    pages: int = 0
    """That vLLM has; 0 before it has counted them."""
    planner: Planner | None = None

    def geometry(self, heads: int, groups: int, head_dim: int, dtype: torch.dtype) -> Geometry:
        """Sizes of a layer with so many KV heads in this process."""
        return Geometry(
            1, heads, groups, self.terms.slots, head_dim, dtype, torch.device("meta"),
            self.terms.max_length, heads * self.first_part,
        )  # fmt: skip

    def planning(self, geometry: Geometry, device: torch.device) -> Planner:
        """The planner: one for all layers."""
        if self.planner is None:
            heads = geometry.heads * geometry.groups
            most = max(1, WEIGHTS_A_ROW // (heads * self.schedule.capacity))
            weights = most if self.policy.needs_attention else None
            self.planner = Planner(self.pages, weights, device)
        return self.planner

    def tell(self, page: int, prompt: int, asked: Mapping[str, Any]) -> Told:
        """Notes who holds a page from now on.

        Args:
            asked: the request's own `vllm_xargs`: kv_budget (slots), kv_seed. door.py has refused
                what cannot be; where nobody stood there, the deployment's budget holds.
        """
        try:
            own = asked.get("kv_budget")
            schedule = self.schedule if own is None else self.terms.schedule(own)
        except UserError:
            schedule = self.schedule
        self.told[page] = Told(prompt, schedule, int(asked.get("kv_seed") or 0))
        return self.told[page]


_current: list[WorkerSession] = []


def current() -> WorkerSession:
    """This process' session.

    Raises:
        UserError: if vLLM was started without our worker.
    """
    if not _current:
        raise UserError(
            "attention backend CUSTOM of kvpolicies without its worker: start vLLM by kvpolicies "
            "vllm, whose --print shows the arguments"
        )
    return _current[0]


def start(config: Any, rank: int) -> WorkerSession:
    """Begins a session for a `VllmConfig`.

    Args:
        rank: of this process among the tensor parallel ones.

    Raises:
        UserError: for what cannot work, by name.
    """
    terms = Terms.of(config.additional_config)
    policy, spec = terms.resolved(), BudgetSpec(terms.budget, terms.sinks, terms.window)
    check_vllm(config)
    check_policy(policy, eager=config.model_config.enforce_eager)
    check_budget(spec, policy)
    if config.model_config.max_model_len > terms.max_length:
        raise UserError(
            f"max_model_len {config.model_config.max_model_len} is more than the {terms.max_length}"
            " tokens that kvpolicies was told"
        )
    model = with_rope(meta_model(config.model_config.hf_text_config, config.model_config.dtype))
    check_model(model, policy, config.parallel_config.tensor_parallel_size)
    ropes = find_ropes(model)
    session = WorkerSession(terms, policy, terms.schedule(), ropes, rank)
    _current[:] = [session]
    return session


def with_rope(model: Any) -> Any:
    """A model without storage, whose rotary embedding has its numbers, on the CPU."""
    for name, module in list(model.named_modules()):
        if name.endswith("rotary_emb"):
            model.set_submodule(name, type(module)(config=module.config))
    return model
