"""Eviction traces: saving, reading off, and refusing what is no trace."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.cli import main
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


@pytest.mark.parametrize(
    ("times", "tokens", "says"),
    [
        ([[]], [[]], "holds no tokens"),
        ([[2, 2, 9]], [[5, 6, 7]], None),
        ([[2, 1, 9]], [[5, 6, 7]], "a token is evicted before it was there"),
        ([[0, 9, 9]], [[5, 6, 7]], "a token is evicted before it was there"),
        ([[9, 9, 9]], [[5, 6, -1]], None),
        ([[9, 0, 0]], [[5, -1, -1]], None),
        ([[9, 9, 9]], [[5, -1, 7]], "-1 behind a sequence's end alone"),
        ([[9, 9, 9]], [[-1, -1, -1]], "-1 behind a sequence's end alone"),
        ([[9, 9, 9]], [[5, 6, -2]], "-1 behind a sequence's end alone"),
    ],
)
def test_what_no_decode_writes_is_refused(
    tmp_path: Path, times: list, tokens: list, says: str | None
) -> None:
    file = tmp_path / "t.safetensors"
    given = torch.tensor(times, dtype=torch.int32)[:, None, None]
    EvictionTrace(given, torch.tensor(tokens).long()).save(file)
    if says is None:
        EvictionTrace.load(file)
        return
    with pytest.raises(UserError, match=says):
        EvictionTrace.load(file)


def test_a_replay_of_tokens_that_the_model_has_not() -> None:
    times = torch.full((1, 2, 2, 2), NEVER, dtype=torch.int32)
    with pytest.raises(UserError, match="the trace holds token 97; the model's are 0 to 96"):
        kvpolicies.replay(tiny(), EvictionTrace(times, torch.tensor([[5, 97]])))


def test_the_command_replays_one_sequence(tmp_path: Path, capsys: Any) -> None:
    times = torch.full((2, 4, 2, 2), NEVER, dtype=torch.int32)
    EvictionTrace(times, torch.tensor([[5, 6], [5, 6]])).save(tmp_path / "t.safetensors")
    assert main(["replay", str(tmp_path / "t.safetensors")]) == 2
    assert "holds 2 sequences" in capsys.readouterr().err
