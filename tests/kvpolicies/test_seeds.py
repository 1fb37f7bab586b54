"""Seeds are whole numbers, however large."""

import pytest

import kvpolicies
from tests.support.models import prompts, tiny


@pytest.mark.parametrize("seed", [2**53 + 1, 2**62])
def test_seeds_of_sampling_and_of_random(seed: int) -> None:
    def tokens(n: int) -> list[int]:
        more = {"max_new_tokens": 8, "eos_token_id": -1, "temperature": 1.0, "seed": n}
        (made,) = kvpolicies.generate(tiny(), prompts(33), f"random(seed={n})", 24, **more)
        return made.tokens

    assert tokens(seed) == tokens(seed) != tokens(seed - 1)
