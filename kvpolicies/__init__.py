"""KV-cache eviction policies behind one API, one exact budget, one decode loop.

Importing this package does nothing: names load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicies.adapter import attach as attach
    from kvpolicies.budget import Budget as Budget
    from kvpolicies.cache import FixedBudgetCache as FixedBudgetCache
    from kvpolicies.decoding import Generation as Generation
    from kvpolicies.decoding import generate as generate
    from kvpolicies.errors import UserError as UserError
    from kvpolicies.policy import Policy as Policy
    from kvpolicies.registry import policy_names as policy_names
    from kvpolicies.registry import resolve as resolve
    from kvpolicies.replaying import replay as replay
    from kvpolicies.trace import EvictionTrace as EvictionTrace

__version__ = "0.1.0"

_PUBLIC = {
    "Budget": "budget",
    "EvictionTrace": "trace",
    "FixedBudgetCache": "cache",
    "Generation": "decoding",
    "Policy": "policy",
    "UserError": "errors",
    "attach": "adapter",
    "generate": "decoding",
    "policy_names": "registry",
    "replay": "replaying",
    "resolve": "registry",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvpolicies' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvpolicies.{_PUBLIC[name]}"), name)
