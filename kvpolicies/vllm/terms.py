"""What a deployment asks of vLLM: a policy and its budget, as text that travels to its workers."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvpolicies.admission import asked_for, scheduled
from kvpolicies.budget import BudgetSpec
from kvpolicies.errors import UserError
from kvpolicies.policy import Policy, Schedule
from kvpolicies.registry import resolve

KEY = "kvpolicies"
"""Under which vLLM's `additional_config` holds the terms."""
VARIABLE = "KVPOLICIES_VLLM"
"""Environment variable that tells vLLM's front end the terms, which is not shown its config."""


@dataclass(frozen=True)
class Terms:
    """A policy with its budget, and the longest sequence."""

    policy: str
    budget: str
    sinks: int | None
    window: int | None
    max_length: int
    """Tokens of prompt and answer."""

    @classmethod
    def of(cls, additional_config: Any) -> "Terms":
        """Those that vLLM's `additional_config` holds.

        Raises:
            UserError: if it holds none.
        """
        found = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if not isinstance(found, Mapping):
            raise UserError(
                f"vLLM's additional_config names no {KEY}: start it by kvpolicies vllm, whose "
                "--print shows the arguments"
            )
        return cls(**found)

    @classmethod
    def of_environment(cls) -> "Terms | None":
        """Those that the launcher left to vLLM's front end; None if another launcher started it."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    @property
    def mapping(self) -> dict[str, Any]:
        """What `of` reads back."""
        return {KEY: asdict(self)}

    @property
    def text(self) -> str:
        """What `of_environment` reads back."""
        return json.dumps(asdict(self))

    def resolved(self) -> Policy:
        """The policy."""
        return resolve(self.policy)

    def schedule(self, budget: int | None = None) -> Schedule:
        """When a request evicts, under its own budget of so many slots or the deployment's.

        Raises:
            UserError: for a budget that is impossible, or larger than the deployment's.
        """
        policy, spec = self.resolved(), BudgetSpec(self.budget, self.sinks, self.window)
        if budget is not None:
            most = int(spec.amount)
            if not policy.evicts:
                raise UserError(f"kv_budget: policy {policy} evicts nothing")
            if isinstance(budget, bool) or not isinstance(budget, int) or not 0 < budget <= most:
                raise UserError(
                    f"kv_budget must be a whole number of slots, at most {most} here, got "
                    f"{budget!r}"
                )
            spec = BudgetSpec(str(budget), self.sinks, self.window)
        # Nothing of it depends on a prompt: refusals.py refuses policies and budgets that do.
        return scheduled(policy, asked_for(policy, spec, self.max_length, self.max_length), 0, 0)

    @property
    def slots(self) -> int:
        """Slots of a KV head that a page holds."""
        return min(self.max_length, self.schedule().capacity)
