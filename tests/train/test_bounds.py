"""Sizes that no machine has are refused by arithmetic, before anything is allocated."""

import pytest
import torch

from kvpolicies import room
from kvpolicies.cli import main
from kvpolicies.errors import UserError
from kvpolicies.learned.base import config_for
from kvpolicies.train import bounds
from kvpolicies.train.recipe import Recipe
from tests.support.models import tiny

BASE = {"sequence": 320, "budget": (69,), "min_future": 16, "batch": 2, "device": "cpu"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB and four cores, wherever the test runs."""
    monkeypatch.setattr(room, "total", lambda device=None: 16 << 30)
    monkeypatch.setattr(bounds.os, "cpu_count", lambda: 4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 1 << 40}, "batch 1099511627776 of 320 tokens would take .* has 16 GiB"),
        ({"sequence": 1 << 40}, "batch 2 of 1,099,511,627,776 tokens would take"),
        ({"workers": 5}, "workers 5: this machine has 4 cores"),
        ({"devices": 8, "batch": 8}, "devices 8 on cpu: this machine has 4 cores"),
    ],
)
def test_rows_and_processes(given: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        bounds.check_machine(Recipe(**{**BASE, **given}))
    bounds.check_machine(Recipe(**BASE))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"held_out": 1 << 30}, r"held_out must lie in \[1, 65536\]"),
        ({"seed": 1 << 70}, "seed must be at most 4611686018427387904"),
        ({"steps": 10**30}, "steps must be at most"),
        ({"base_lr": 1e9, "recipe": "distill"}, r"base_lr must lie in \(0, 1e\+06\]"),
    ],
)
def test_what_no_library_counts_with(given: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Recipe(**{**BASE, **given})


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [
        ("kvpop", {"memory": 1 << 20}, "kvpop with memory 1,048,576 would take .* lower memory"),
        ("kvpop_mlp", {"hidden": 1 << 20}, "kvpop_mlp with hidden 1,048,576 .* lower hidden"),
        ("trimkv", {"hidden": 1 << 22}, "hidden must be at most 1048576"),
        ("trimkv", {"hidden": 1 << 20, "batch": 8}, "trimkv with hidden 1,048,576 would take"),
    ],
)
def test_a_scorers_sizes(kind: str, size: dict, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    from kvpolicies.train.fit import new_scorer

    recipe = Recipe(**{**BASE, "kind": kind, **size})
    with pytest.raises(UserError, match=says):
        new_scorer(recipe, tiny())
    # What fits is not refused: the figures are less than what a step takes.
    bounds.check_scorer(Recipe(**{**BASE, "kind": kind}), config_for(tiny(), kind))


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(**given: object) -> torch.device:
        return bounds.device_of(Recipe(**{**BASE, **given}))  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device() == device(device="auto") == torch.device("cpu")
    for name in ("cuda", "cuda:0", "mps"):
        with pytest.raises(UserError, match=f"1 of device {name}: this machine has 0"):
            device(device=name)
    with pytest.raises(UserError, match="strategy fsdp spreads a model over GPUs"):
        device(strategy="fsdp")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device(device="auto") == torch.device("cuda:0")
    assert device(device="cuda:1") == torch.device("cuda:1")
    for given in ({"device": "cuda:2"}, {"device": "cuda", "devices": 4, "batch": 4}):
        with pytest.raises(UserError, match="this machine has 2"):
            device(**given)


def test_the_command_says_so_before_it_imports_torch(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "ledger-dms", "--batch", str(1 << 40), "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    assert "lower batch or sequence" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
