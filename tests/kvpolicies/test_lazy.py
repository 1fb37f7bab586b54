"""lazy keeps what recurs: under the paper's alpha its kept sets are not the newest tokens."""

from types import ModuleType

import numpy as np

from kvpolicies.budget import Budget
from kvpolicies.registry import resolve
from tests.support.streams import layer_for, run_stream


def test_it_is_not_streaming_by_its_ties(reference: ModuleType) -> None:
    """It was, in 99.9 % of kept sets of short traces: every eligible token scored alike."""
    stream = reference.draw(np.random.default_rng(0), tokens=200, prompt=40, sharpness=4.0)
    times = run_stream(layer_for(stream, resolve("lazy"), Budget(64, 4, 8)), stream).numpy()
    oldest = []
    for of_head in times:
        for now in np.unique(of_head[of_head < len(of_head)]):
            held = np.flatnonzero(of_head[:now] >= now)[4:]  # but for the sinks
            gone = np.flatnonzero(of_head == now)
            oldest.append(np.array_equal(gone, held[: len(gone)]))
    assert len(oldest) > 30 and np.mean(oldest) < 0.1
