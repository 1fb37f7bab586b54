"""What one prompt became: the result of the decode loop."""

from dataclasses import dataclass

from kvpolicies.trace import EvictionTrace


@dataclass(frozen=True)
class Generation:
    """What one prompt became."""

    request: int
    """Index of the prompt."""
    tokens: list[int]
    """New tokens, the stop token included."""
    finish: str
    """"stop" (a stop token) or "length"."""
    prompt_tokens: int
    """Tokens of the prompt."""
    seconds: float
    """Its share of the wall clock: a forward's time is divided equally among its rows."""
    max_slots: int
    """The most slots any KV head held."""
    budget_total: int
    """Slots of its budget, by a paper's own rule where that was chosen."""
    asked_slots: int
    """Slots that were asked for; fewer than `budget_total` under a paper's own rule only."""
    cache_bytes: int
    """Keys, values and positions of its row, all layers, as allocated."""
    state_bytes: int
    """The policy's own tensors of its row, all layers."""
    choices: list[int]
    """What the model chose at each step: its tokens, unless others were forced."""
    trace: EvictionTrace | None = None
    """Eviction times of prompt and new tokens, if they were asked for."""
