"""What policies evict from traces whose tokens they are made to decode, and when."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvpolicies.decoding import generate
from kvpolicies.eval.revisit.setting import Setting
from kvpolicies.eval.revisit.traces import Trace


@dataclass(frozen=True)
class Evictions:
    """What one policy at one budget did to one trace."""

    times: Tensor
    """[layers, H, S] int32 (trace.py)."""
    slots: int


def decode(
    analysis: Setting, unit: Sequence[Trace], number: int, step: Callable[[int], Any]
) -> dict[str, list[Evictions]]:
    """Evictions of each policy and budget by the trace's id, the unit decoded together.

    Args:
        number: of the unit's first trace: seeds the random policy.
        step: called with the number of traces when a policy and budget is done.
    """
    found: dict[str, list[Evictions]] = {trace.id: [] for trace in unit}
    for policy, budget in analysis.cells:
        generations = generate(
            analysis.model,
            [trace.prompt for trace in unit],
            policy,
            budget,
            max_new_tokens=[len(trace.new) for trace in unit],
            forced=[trace.new for trace in unit],
            request_ids=range(number, number + len(unit)),
            seed=analysis.config.seed,
            trace=True,
        )
        for trace, made in zip(unit, generations, strict=True):
            assert made.trace is not None
            found[trace.id].append(Evictions(made.trace.times[0], made.budget_total))
        step(len(unit))
    return found
