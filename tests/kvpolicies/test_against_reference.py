"""Which positions are kept, against slow numpy references written from the policies' cards."""

from types import ModuleType

import numpy as np
import pytest
import torch

from kvpolicies.budget import Budget
from kvpolicies.registry import resolve
from tests.support.streams import layer_for, run_stream

# Our spec, and the reference's class and options.
PAIRS = {
    "streaming": ("streaming", {}),
    "tova": ("tova", {}),
    "tova(faithful=True)": ("tova", {"faithful": True}),
    "h2o": ("h2o", {}),
    "snapkv": ("snapkv", {}),
    "rpc": ("rpc", {}),
    "keydiff": ("keydiff", {}),
    "lazy": ("lazy", {}),
    "lazy(alpha=0.05)": ("lazy", {"alpha": 0.05}),
    "rkv": ("rkv", {}),
    "rkv(beta=2, mix=0.5)": ("rkv", {"beta": 2, "lam": 0.5}),
    "beacon": ("beacon", {}),
    "beacon(n_beacon=4, n_recent=4)": ("beacon", {"n_beacon": 4, "n_recent": 4}),
    "beacon(n_beacon=0, n_recent=8)": ("beacon", {"n_beacon": 0, "n_recent": 8}),
    "beacon(n_beacon=7, n_recent=1, pool='mean')": (
        "beacon",
        {"n_beacon": 7, "n_recent": 1, "pool": "mean"},
    ),
    "beacon(n_beacon=8, n_recent=8, selector='initial')": (
        "beacon",
        {"n_beacon": 8, "n_recent": 8, "selector": "initial"},
    ),
    "beacon(n_beacon=8, n_recent=8, space='post_rope')": (
        "beacon",
        {"n_beacon": 8, "n_recent": 8, "space": "post_rope"},
    ),
}

# Blocks of cases a spec: 200 cases for the policy whose steps are many, fewer for the others.
BLOCK = 20
BLOCKS = {"beacon": 10, "beacon(n_beacon=4, n_recent=4)": 4}
RUNS = [(spec, block) for spec in PAIRS for block in range(BLOCKS.get(spec, 2))]


def _case(reference: ModuleType, seed: int):
    """A random sequence and budget: from just above sinks + window, prompts up to 4 x budget."""
    rng = np.random.default_rng(seed)
    sinks, window = int(rng.integers(0, 5)), int(rng.integers(0, 9))
    total = sinks + window + int(rng.choice([1, 2, 5, 11, 20]))
    prompt = int(rng.integers(1, 4 * total + 1))
    stream = reference.draw(
        rng,
        heads=int(rng.integers(1, 3)),
        group=int(rng.choice([1, 2, 4, 7])),
        tokens=prompt + int(rng.integers(1, 41)),
        dim=int(rng.choice([4, 8, 32])),
        prompt=prompt,
    )
    return stream, (total, sinks, window)


# Their scores tie exactly in any precision (positions, zeros, infinities): ties prove something.
TIES_ARE_EXACT = ("streaming", "lazy", "rpc")


def _clear(outcome, exact: bool) -> int:
    """Evictions before the first near-tie, past which float32 and float64 may honestly part.

    Other exact ties count as near ones, for a float32 matrix product does not keep them; the rule
    for ties is proven in test_eviction.py.
    """
    for i, eviction in enumerate(outcome.evictions):
        tie = any(gap <= 1e-5 and not (exact and gap == 0) for gap in eviction.margins)
        if tie or 0 < eviction.state_gap <= 1e-6:
            return i
    return len(outcome.evictions)


@pytest.mark.parametrize(("spec", "block"), RUNS)
def test_kept_positions(spec: str, block: int, reference: ModuleType) -> None:
    name, options = PAIRS[spec]
    compared = 0
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        stream, numbers = _case(reference, seed)
        policy = reference.POLICIES[name](**options)
        outcome = reference.simulate(policy, stream, reference.Budget(*numbers))
        layer = layer_for(stream, resolve(spec), Budget(*numbers))
        ours = run_stream(layer, stream).numpy()
        clear = _clear(outcome, name in TIES_ARE_EXACT)
        until = outcome.e.shape[1] + 1
        if clear < len(outcome.evictions):
            until = outcome.evictions[clear].position + 1
        theirs = np.where(outcome.e >= until, -1, outcome.e)
        assert np.array_equal(np.where(ours >= until, -1, ours), theirs), f"case {seed}: {numbers}"
        compared += clear
    assert compared > 5 * BLOCK, "near-ties cut too many cases short to prove anything"


def test_one_kept_set_a_layer_for_tova(reference: ModuleType) -> None:
    stream, _ = _case(reference, 5)
    times = run_stream(layer_for(stream, resolve("tova"), Budget(16, 2, 4)), stream)
    assert torch.equal(times, times[:1].expand(times.shape))
