"""Quotas of segments around any policy: which tokens stay, and what a spec of it means."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from kvpolicies.errors import UserError
from kvpolicies.quota import MassQuota, segments
from kvpolicies.registry import resolve
from tests.reference import quota as slow
from tests.support.against import compare, spec_of
from tests.support.cases import Needs, draw_batch

SMALL = {"observe_window": 5, "step": 0.2, "shortest": 3, "longest": 9, "least": 2}
BASES: list[tuple[str, dict[str, Any]]] = [
    ("streaming", {}),
    ("keydiff", {"every": 6}),
    ("tova", {}),
    ("rpc", {"observe_window": 4}),
    ("h2o", {}),
    ("rkv", {"alpha": 3}),
    ("beacon", {"n_beacon": 4, "n_recent": 4}),
]


@pytest.mark.parametrize(("name", "options"), BASES)
def test_kept_positions(name: str, options: dict[str, Any], reference: ModuleType) -> None:
    needs = Needs(topks=(5, 11, 20, 30), kinds=("real",) * 5)
    batches = [draw_batch(f"quota {name}", i, needs) for i in range(10)]
    ours = MassQuota(base=resolve(spec_of(name, options)), **SMALL)
    base, one_set = reference.POLICIES[name](**options), name in ("tova", "rpc")
    theirs = slow.MassQuota(base=base, one_set=one_set, **SMALL)
    # What segments keep at least ties in whole numbers.
    compare(name, options, batches, lambda kind: True, reference, (ours, theirs))


@pytest.mark.parametrize("seed", range(40))
def test_segments_are_those_of_the_slow_way(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    length = int(torch.randint(2, 300, (1,), generator=g))
    n = int(torch.randint(2, length + 1, (1,), generator=g))
    mass = torch.rand(length, generator=g, dtype=torch.float64) ** (4 if seed % 2 else 30)
    mass[n:] = 0
    mass /= mass.sum()
    step, shortest, longest = [(0.02, 32, 1024), (0.3, 8, 20), (0.05, 1, 7)][seed % 3]
    there = torch.arange(length) < n
    found = segments(mass[None, None], there[None, None], step, shortest, longest)[0, 0, :n]
    expected = slow.cut(mass[:n].tolist(), step, shortest, longest)
    assert found.tolist() == [i for i, part in enumerate(expected) for _ in part]


def test_specs() -> None:
    policy = resolve("beacon(n_beacon=8, quota='ams')")
    assert str(policy) == "beacon(n_beacon=8, quota='ams')"
    assert str(resolve("tova(quota='ams')")) == "tova(quota='ams')"
    assert resolve(str(policy)) == policy
    assert (policy.name, policy.source) == ("beacon", resolve("beacon").source)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("beacon(quota='asm')", "quota must be ams, got 'asm'"),
        ("beacon(quota=1)", "quota must be ams, got 1"),
        ("full(quota='ams')", "evicts nothing"),
        ("streaming(positions='cache', quota='ams')", "rank in the cache"),
    ],
)
def test_what_cannot_be_is_one_line(spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(spec)
