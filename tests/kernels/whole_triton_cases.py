"""A whole generation with Triton's kernels in the interpreter: the tokens that torch's give."""

from __future__ import annotations

import pytest

from kvpolicies import Budget, generate
from tests.kernels.support_triton import on_triton
from tests.support.models import prompts, tiny


@pytest.mark.parametrize("policy", ["rkv", "tova", "beacon(n_beacon=2, n_recent=3)"])
def test_the_same_tokens_and_evictions(policy: str) -> None:
    def run():
        budget, words = Budget(12, sinks=1, window=3), prompts(13, 12)
        return generate(tiny(), words, policy, budget, max_new_tokens=3, eos_token_id=[])

    expected = run()
    with on_triton():
        got = run()
    assert [g.tokens for g in got] == [g.tokens for g in expected]
