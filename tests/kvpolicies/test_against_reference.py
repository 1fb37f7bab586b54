"""Which positions are kept, against slow numpy references written from the policies' cards."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvpolicies.budget import Budget
from kvpolicies.registry import resolve
from tests.support.against import compare, spec_of
from tests.support.cases import ALL_KINDS, WHOLE, Batch, Needs, draw_batch
from tests.support.streams import layer_for, run_stream

EIGHT = {"n_beacon": 8, "n_recent": 8}
FOUR = {"n_beacon": 4, "n_recent": 4}

# Policy and options; blocks of 24 cases.
RUNS: list[tuple[str, dict[str, Any], int]] = [
    ("streaming", {}, 13),
    ("tova", {}, 13),
    ("tova", {"faithful": True}, 4),
    ("h2o", {}, 13),
    ("h2o", {"faithful": True}, 4),
    ("snapkv", {}, 9),
    ("snapkv", {"observe_window": 4, "kernel": 3}, 4),
    ("snapkv", {"faithful": True, "observe_window": 4}, 4),
    ("rpc", {}, 9),
    ("rpc", {"observe_window": 4, "kernel": 3}, 4),
    ("rpc", {"faithful": True, "P": 16, "c": 4, "observe_window": 4}, 4),
    ("keydiff", {}, 9),
    ("keydiff", {"every": 1}, 4),
    ("lazy", {}, 9),
    ("lazy", {"alpha": 0.05}, 4),
    ("lazy", {"faithful": True, "alpha": 0.05, "every": 4}, 4),
    ("rkv", {}, 9),
    ("rkv", {"beta": 2, "mix": 0.5, "alpha": 3}, 4),
    ("rkv", {"faithful": True, "every": 8}, 4),
    ("oracle", {}, 13),
    ("beacon", {}, 13),
    ("beacon", FOUR, 6),
    ("beacon", {"n_beacon": 0, "n_recent": 8}, 3),
    ("beacon", {"n_beacon": 7, "n_recent": 1, "pool": "mean"}, 3),
    ("beacon", {**EIGHT, "selector": "initial"}, 3),
    ("beacon", {**FOUR, "faithful": True}, 3),
    ("beacon", {**EIGHT, "space": "post_rope"}, 3),
    ("beacon", {**FOUR, "pool": "soft"}, 3),
    ("beacon", {**EIGHT, "pool": "soft", "temperature": 1.5}, 3),
    ("beacon", {**FOUR, "shared": True}, 3),
    ("beacon", {**EIGHT, "shared": True, "space": "post_rope"}, 3),
    ("beacon", {**FOUR, "selector": "naive_fps"}, 3),
    ("beacon", {**FOUR, "selector": "kmeans_centroid"}, 3),
    ("beacon", {"n_beacon": 2, "n_recent": 4, "selector": "kmeans_nearest"}, 3),
    ("beacon", {**FOUR, "selector": "kmeans_centroid", "shared": True, "space": "post_rope"}, 3),
    ("beacon", {**FOUR, "refresh": "revisit"}, 3),
    ("beacon", {**EIGHT, "refresh": "revisit", "shared": True, "space": "post_rope"}, 3),
]
BATCHES = 10  # a block


SUMS = ("real", "real", "copies", "one-hot", "one-hot")
ROUNDED = ("real", "real", "real", "real", "copies")
KINDS: dict[str, tuple[str, ...]] = {
    # Its mean over heads tells copies of real ones apart: they come with one-hot attention.
    "tova": ("real", "real", "real", "one-hot", "one-hot"),
    "h2o": SUMS,
    "snapkv": SUMS,
    "rpc": SUMS,
    "rkv": ("real", "real", "copies", "whole", "whole"),
    "keydiff": ("real", "real", "copies", "copies", "copies"),
    "oracle": ("real", "real", "real", "copies", "copies"),
}


def needs_of(name: str, options: dict[str, Any]) -> Needs:
    """What the cases of a policy must be like: those whose ties prove most (`ties_are_exact`)."""
    kinds = KINDS.get(name, ALL_KINDS)
    if name == "beacon":
        own = {
            "mean": SUMS,
            "soft": ROUNDED,
            "kmeans_centroid": ROUNDED,
            "kmeans_nearest": ("topics",) * 5,
            # Cosines of copies to copies are 1, but for rounding.
            "revisit": ("real", "real", "real", "whole", "one-hot"),
        }
        kinds = next((own[value] for value in options.values() if value in own), ALL_KINDS)
        # The phases want room for the recents. Of two queries in a cluster both are nearest to
        # its centre: clusters must be larger.
        topks = (20, 36) if "kmeans_nearest" in options.values() else (1, 5, 11, 20, 36)
        # Over the root of 2 or 7, which sharing divides by, whole cosines are not exact.
        groups = (1, 4) if options.get("shared") else Needs.groups
        beside = options["n_recent"] + 1 if options.get("faithful") else None
        return Needs(
            topks=topks, kinds=kinds, groups=groups, beside=beside, slots=(beside or -1) + 1
        )
    if name == "rpc":
        # Of seven heads the means are not exact, and are summed. A paper's periods want time.
        return Needs(decoded=60 if "P" in options else 41, kinds=kinds, groups=(1, 2, 4))
    # A paper's own rule wants room for the observing tokens.
    slots = {"snapkv": 5, "rkv": 9, "lazy": 5}.get(name, 0) if options.get("faithful") else 0
    return Needs(slots=slots, kinds=kinds)


def batch_of(name: str, options: dict[str, Any], number: int) -> Batch:
    return draw_batch(spec_of(name, options), number, needs_of(name, options))


def blocks() -> list[Any]:
    return [
        pytest.param(name, options, block, id=f"{spec_of(name, options)}-{block}")
        for name, options, n in RUNS
        for block in range(n)
    ]


def ties_are_exact(name: str, kind: str) -> bool:
    """Whether scores that tie exactly in float64 do in float32, whatever the order of its sums.

    Positions and recurrences are whole numbers. Of whole-numbered queries and keys every weight
    ties, and a maximum over weights; sums of weights tie if attention is one-hot, for then they
    are dyadic. KeyDiff's cosines tie for equal keys, each being computed alike.
    """
    if name in ("streaming", "lazy"):
        return True
    if name == "keydiff":
        return kind == "copies"
    return kind in WHOLE


@pytest.mark.parametrize(("name", "options", "block"), blocks())
def test_kept_positions(
    name: str, options: dict[str, Any], block: int, reference: ModuleType
) -> None:
    numbers = range(BATCHES * block, BATCHES * (block + 1))
    batches = [batch_of(name, options, number) for number in numbers]
    compare(name, options, batches, partial(ties_are_exact, name), reference)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in RUNS))
def test_cases_cover_what_they_should(name: str) -> None:
    seen: Counter[Any] = Counter()
    for batch in all_batches(name):
        padded = len({row.prompt for row in batch.rows}) > 1
        alike = len({(row.prompt, row.budget) for row in batch.rows}) < len(batch.rows)
        for row in batch.rows:
            total, sinks, window = row.budget
            seen["cases"] += 1
            seen.update([batch.kind, ("group", batch.group), ("dim", batch.dim)])
            seen["left-padded"] += padded
            seen["rows that do the same"] += alike
            seen["a prompt in chunks"] += row.prompt > total
            seen["a prompt of one token"] += row.prompt == 1
            seen["a prompt of four budgets"] += row.prompt == 4 * total
            seen["one slot to choose"] += total == sinks + window + 1
    assert seen["cases"] >= 300
    kinds = {
        kind for run, options, _ in RUNS if run == name for kind in needs_of(run, options).kinds
    }
    for kind in kinds:
        assert seen[kind] >= 50, kind
    for group in (1, 2, 4, 7):
        assert seen["group", group] >= 30, group
    for dim in (32, 64, 80, 96, 128):
        assert seen["dim", dim] >= 5, dim
    assert min(seen["left-padded"], seen["a prompt in chunks"]) >= 100
    assert seen["rows that do the same"] >= 50
    assert min(seen["a prompt of one token"], seen["a prompt of four budgets"]) >= 5
    assert seen["one slot to choose"] >= 20


def test_cases_evict_up_to_forty_times_in_a_row(reference: ModuleType) -> None:
    in_a_row = set()
    for batch in all_batches("streaming"):
        for stream, row in zip(batch.streams(reference), batch.rows, strict=True):
            outcome = reference.simulate(
                reference.Streaming(), stream, reference.Budget(*row.budget)
            )
            in_a_row.add(sum(e.position >= row.prompt - 1 for e in outcome.evictions))
    assert in_a_row >= {1, 2, 3, 40}


def all_batches(name: str) -> list[Batch]:
    return [
        batch_of(name, options, number)
        for run, options, n in RUNS
        if run == name
        for number in range(BATCHES * n)
    ]


@pytest.mark.parametrize("name", ["tova", "rpc"])
def test_one_kept_set_a_layer(name: str, reference: ModuleType) -> None:
    stream = reference.draw(np.random.default_rng(5), heads=2, tokens=90, prompt=60)
    times = run_stream(layer_for(stream, resolve(name), Budget(16, 2, 4)), stream)
    assert torch.equal(times, times[:1].expand(times.shape))
