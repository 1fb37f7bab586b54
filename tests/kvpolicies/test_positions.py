"""A prompt beyond the model's positions is refused, or one caution; logits that are NaN refused."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies.errors import Caution, UserError
from kvpolicies.positions import check_positions, reach
from tests.support.models import prompts, tiny


def model_of(**config: Any) -> Any:
    """What `check_positions` reads of a model."""
    text = SimpleNamespace(**config)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: text))


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, **more}


@pytest.mark.parametrize(
    ("parameters", "scaled"),
    [
        (rope("default"), 100),
        (rope("yarn", factor=4.0, original_max_position_embeddings=64), 256),
        (rope("linear", factor=2.0), 200),
        (rope("dynamic", factor=3.0), 300),
        (rope("llama3", factor=8.0, original_max_position_embeddings=8), 100),
        (rope("longrope", original_max_position_embeddings=50), 100),
        ({"full_attention": rope("linear", factor=8.0), "sliding_attention": rope("default")}, 800),
    ],
)
def test_how_far_a_rotation_is_stretched(parameters: dict[str, Any], scaled: int) -> None:
    model = model_of(max_position_embeddings=100, rope_parameters=parameters)
    assert reach(model.config) == (100, scaled, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_positions(model, 100, scaled - 99)
        with pytest.raises(UserError, match=f"a prompt of {scaled + 1} tokens .* {scaled} pos"):
            check_positions(model, scaled + 1)
        with pytest.raises(Caution, match=f"beyond the {scaled} positions"):
            check_positions(model, 100, scaled - 98)
        if scaled > 100:
            with pytest.raises(Caution, match=f"longer than the 100 .* the {scaled} that its RoPE"):
                check_positions(model, 101)


def test_a_table_of_positions_ends() -> None:
    model = model_of(max_position_embeddings=100)
    check_positions(model, 90, 11)
    with pytest.raises(UserError, match="whose table of them ends there"):
        check_positions(model, 90, 12)
    check_positions(model_of(), 1 << 40)


def test_generate_and_serving_refuse_before_anything_runs() -> None:
    long = prompts(5, 1025)
    with pytest.raises(UserError, match="prompt of 1025 tokens is longer than the 1024 positions"):
        kvpolicies.generate(tiny(), long, "streaming", 64, max_new_tokens=2)
    with pytest.warns(Caution, match="beyond the 1024 positions"):
        kvpolicies.generate(
            tiny(), prompts(4), "streaming", 64, max_new_tokens=[1022], eos_token_id=range(97)
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    model = copy.deepcopy(tiny())
    given = prompts(6, 9)
    row = next(t for t in range(97) if all(t not in p for p in given))
    (first,) = kvpolicies.generate(model, given[:1], "full", 1, max_new_tokens=3, eos_token_id=-1)
    with torch.no_grad():
        model.lm_head.weight[row] = bad
    with pytest.raises(UserError, match="logits are not finite at its new token 0"):
        kvpolicies.generate(
            model, given, "streaming", 64, max_new_tokens=3, temperature=temperature
        )
    with pytest.raises(UserError, match="logits are not finite at its new token 0"):
        kvpolicies.generate(
            model, given[:1], "streaming", 64, max_new_tokens=3, forced=[first.tokens]
        )


@pytest.mark.parametrize("token", [-1, 97, 10**9, 2**70])
def test_tokens_that_the_model_has_not(token: int) -> None:
    says = f"prompt 1 holds token {token}; the model's are 0 to 96"
    cases: list[dict[str, Any]] = [{}, {"forced": [[1, 2], [3, token]]}]
    for options in cases:
        given = [[5], [5, 6]] if options else [[5], [5, token]]
        with pytest.raises(UserError, match=says):
            kvpolicies.generate(tiny(), given, "full", 1, max_new_tokens=2, **options)
