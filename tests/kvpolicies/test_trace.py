"""Eviction traces: saving, reading off, and refusing what is no trace."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.trace import NEVER, EvictionTrace
from tests.support.models import prompts, tiny


def test_roundtrip_and_what_can_be_read_off(tmp_path: Path) -> None:
    (out,) = kvpolicies.generate(
        tiny(), prompts(30), "h2o", Budget(20, 2, 4), max_new_tokens=30, eos_token_id=-1, trace=True
    )
    trace = out.trace
    assert trace is not None
    trace.save(tmp_path / "t.safetensors")
    again = EvictionTrace.load(tmp_path / "t.safetensors")
    for name in ("times", "tokens", "prompts", "last"):
        assert torch.equal(getattr(again, name), getattr(trace, name))
    assert torch.equal(again.prompts, torch.tensor([30]))  # type: ignore[arg-type]
    assert torch.equal(again.last, torch.tensor(out.tokens[-1:]))  # type: ignore[arg-type]
    for query in range(trace.times.shape[-1]):
        assert (trace.cache_length(query) <= 20).all()
    assert (trace.cache_length(trace.times.shape[-1] - 1) == 20).all()
    mask = trace.visible(1)
    t = trace.times[0, 1, 0]
    for q, k in [(5, 9), (40, 0), (40, 20), (58, 30)]:
        assert bool(mask[0, 0, q, k]) == (k <= q < int(t[k]))


def test_stack_pads_behind_the_end() -> None:
    traces = [
        EvictionTrace(torch.full((1, 1, 1, n), 3, dtype=torch.int32), torch.zeros(1, n).long())
        for n in (2, 4)
    ]
    stacked = EvictionTrace.stack(traces)
    assert stacked.times[0, 0, 0].tolist() == [3, 3, NEVER, NEVER]
    assert stacked.tokens[0].tolist() == [0, 0, -1, -1] and stacked.prompts is None
    told = [replace(t, prompts=torch.tensor([n])) for n, t in enumerate(traces, 1)]
    joined = EvictionTrace.stack(told).prompts
    assert joined is not None and joined.tolist() == [1, 2]
    for bad in ([0], [3], [-1]):
        with pytest.raises(UserError, match="prompts"):
            replace(traces[0], prompts=torch.tensor(bad))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"not a trace")
    save_file({"times": torch.zeros(1, 1, 1, 2), "tokens": torch.zeros(1)}, tmp_path / "odd")
    for path in ("missing", "junk", "odd"):
        with pytest.raises(ValueError, match=path):
            EvictionTrace.load(tmp_path / path)
