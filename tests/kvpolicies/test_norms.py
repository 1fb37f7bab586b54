"""torch's fused RMS norm stands in only where it computes the same, and only inside an `attach`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import kvpolicies
from kvpolicies.cache import FixedBudgetCache
from kvpolicies.norms import fused_norms
from tests.support.models import prompts, tiny


def norms(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if "Norm" in type(m).__name__]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_norms_of_a_model_are_fused_and_put_back(family: str) -> None:
    model = deepcopy(tiny(family))
    with torch.no_grad():
        for norm in norms(model):
            norm.weight.uniform_(-2, 2)
    x = {m: torch.randn(3, 5, m.weight.shape[0]) for m in norms(model)}
    own = {m: m(x[m]) for m in x}
    with fused_norms(model) as fused:
        assert fused == norms(model)
        for m in fused:
            torch.testing.assert_close(m(x[m]), own[m], rtol=1e-6, atol=1e-6)
    assert not any("forward" in vars(m) for m in x)
    assert all(torch.equal(m(x[m]), own[m]) for m in x)


class PlusOne(nn.Module):
    """As Gemma's: the weight is added to one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def test_other_norms_other_dtypes_and_replaced_forwards_stay() -> None:
    model = deepcopy(tiny())
    other = PlusOne()
    model.model.layers[0].input_layernorm = other
    model.model.layers[1].input_layernorm.bfloat16()
    replaced: Any = model.model.norm
    replaced.forward = lambda x: x
    with fused_norms(model) as fused:
        assert other not in fused and replaced not in fused
        assert model.model.layers[1].input_layernorm not in fused
        assert len(fused) == len(norms(model)) - 2
    assert replaced.forward(1) == 1


def test_an_attached_model_uses_them() -> None:
    model = tiny()
    cache = FixedBudgetCache(model, "streaming", 16)
    with kvpolicies.attach(model, cache):
        assert all("forward" in vars(m) for m in norms(model))
    assert not any("forward" in vars(m) for m in norms(model))
    with pytest.raises(ZeroDivisionError), kvpolicies.attach(model, cache):
        raise ZeroDivisionError
    assert not any("forward" in vars(m) for m in norms(model))


def test_what_is_generated_is_the_models_own() -> None:
    model, (prompt,) = tiny(), prompts(12)
    (ours,) = kvpolicies.generate(model, [prompt], "full", 40, max_new_tokens=24, eos_token_id=-1)
    theirs = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert ours.tokens == theirs[0, len(prompt) :].tolist()
