"""What a request asks of its cache, looked at before vLLM's engine sees it.

vLLM has one place that refuses a request for an argument of its own, with status 400: logits
processors. This one processes nothing.
"""

# pyright: reportMissingImports=false

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from kvpolicies.errors import UserError
from kvpolicies.vllm.terms import Terms


class BudgetDoor(LogitsProcessor):
    """Refuses what `vllm_xargs` cannot ask for: --logits-processors of the launcher."""

    def __init__(self, *_: Any):
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises UserError for a kv_budget that is none, or more than the deployment's."""
        asked = sampling_params.extra_args or {}
        for name in ("kv_budget", "kv_seed"):
            if type(asked.get(name, 0)) is not int:
                raise UserError(f"{name} must be a whole number, got {asked[name]!r}")
        if "kv_budget" not in asked:
            return
        terms = Terms.of_environment()
        if terms is None:
            raise UserError("kv_budget: this server was not started by kvpolicies vllm")
        terms.schedule(asked["kv_budget"])

    def apply(self, logits: Tensor) -> Tensor:
        """The logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """So that greedy requests skip it."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Keeps nothing."""
