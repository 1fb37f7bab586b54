"""A bf16 cache evicts as float32 scoring of the same bf16 keys and queries would."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvpolicies.budget import Budget
from kvpolicies.registry import resolve
from kvpolicies.step import LayerInput
from tests.support.futures import future_of
from tests.support.layer import process
from tests.support.specs import EVICTING
from tests.support.streams import layer_for, tokens_of


def in_dtype(tokens: LayerInput, dtype: torch.dtype) -> LayerInput:
    q, k, v = (x.bfloat16().to(dtype) for x in (tokens.queries, tokens.keys, tokens.values))
    return LayerInput(q, k, v, None, tokens.softmax)


@pytest.mark.parametrize("spec", [s for s in EVICTING if "positions='cache'" not in s])
def test_kept_positions_do_not_depend_on_the_caches_dtype(spec: str, reference: ModuleType) -> None:
    rng = np.random.default_rng(3)
    stream: Any = reference.draw(rng, heads=2, group=2, tokens=90, dim=32, prompt=60)
    whole = in_dtype(tokens_of(stream, 0, 90), torch.float32)
    recording = future_of(whole.queries[0], whole.keys[0], 32**-0.5)
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = layer_for(stream, resolve(spec), Budget(32, 2, 8), dtype=dtype)
        assert layer.keys.dtype == dtype
        layer.group.futures[0][0] = recording
        for first, last in [(0, 60), *((t, t + 1) for t in range(60, 90))]:
            process(layer, in_dtype(tokens_of(stream, first, last), dtype), [0], [last - first])
        times.append(layer.eviction_times)
    assert torch.equal(times[0], times[1])
    assert (times[0] < 90).any()
