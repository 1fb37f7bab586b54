"""Compares which positions our cache keeps with what a slow reference keeps."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from kvpolicies.budget import Budget
from kvpolicies.registry import resolve
from tests.support.cases import Batch
from tests.support.streams import layer_of, run_streams


def spec_of(name: str, options: dict[str, Any]) -> str:
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"{name}({given})" if given else name


def compare(
    name: str,
    options: dict[str, Any],
    batches: Sequence[Batch],
    ties_are_exact: Callable[[str], bool],
    reference: ModuleType,
    both: tuple[Any, Any] | None = None,
) -> None:
    """Every eviction up to the first that float32 could honestly decide otherwise.

    `both`: our policy and the reference's, where no spec says them.
    """
    compared, happened = 0, 0
    for batch in batches:
        streams, budgets = list(batch.streams(reference)), [row.budget for row in batch.rows]
        policy = both[0] if both else resolve(spec_of(name, options))
        layer = layer_of(streams, policy, [Budget(*numbers) for numbers in budgets])
        all_times = [times.numpy() for times in run_streams(layer, streams)]
        for stream, numbers, ours in zip(streams, budgets, all_times, strict=True):
            theirs = both[1] if both else reference.POLICIES[name](**options)
            outcome = reference.simulate(theirs, stream, reference.Budget(*numbers))
            clear = clear_evictions(outcome, ties_are_exact(batch.kind))
            compared, happened = compared + clear, happened + len(outcome.evictions)
            until = outcome.e.shape[1] + 1
            if clear < len(outcome.evictions):
                until = outcome.evictions[clear].position + 1
            expected = np.where(outcome.e >= until, -1, outcome.e)
            assert np.array_equal(np.where(ours >= until, -1, ours), expected), batch
    # A block has about a hundred evictions, and one near-tie ends the comparison of its case.
    assert compared > 0.75 * happened > 0, "near-ties cut too many cases short to prove anything"


def is_clear(eviction: Any, exact: bool) -> bool:
    """Whether float32 must decide as the reference did. `exact`: exact ties are ties there too."""
    if 0 < eviction.state_gap <= 1e-6:
        return False
    pairs = zip(eviction.margins, eviction.edges, strict=True)
    return all(gap > 1e-5 or (gap == 0 and (exact or edge == np.inf)) for gap, edge in pairs)


def clear_evictions(outcome: Any, exact: bool) -> int:
    """Evictions before the first near-tie, past which float32 and float64 may honestly part."""
    return [*(is_clear(eviction, exact) for eviction in outcome.evictions), False].index(False)
