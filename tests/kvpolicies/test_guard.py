"""What an attached model is not to be asked, each thing refused by its own name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from tests.support.models import padded, prompts, tiny

BUDGET = Budget(32, 2, 8)
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def cache_of(spec: str = "streaming") -> kvpolicies.FixedBudgetCache:
    return kvpolicies.FixedBudgetCache(tiny(), spec, BUDGET)


def generate(cache: kvpolicies.FixedBudgetCache, ids: Any, mask: Any = None, **kw: Any) -> Any:
    return tiny().generate(ids, attention_mask=mask, past_key_values=cache, **{**OPTIONS, **kw})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance_scale": 1.5}, r"guidance_scale=1\.5 is not supported"),
        ({"use_cache": False}, "use_cache=False is not supported"),
        ({"num_beams": 3}, "num_beams=3 is not supported: beam search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not supported"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"cache_implementation": "static"}, "cache_implementation='static' is not supported"),
        ({"assistant_model": torch.nn.Linear(1, 1)}, "assistant_model=Linear is not supported"),
    ],
)
def test_options_of_generate_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    cache = cache_of()
    with kvpolicies.attach(tiny(), cache):
        with pytest.raises(UserError, match=message) as error:
            generate(cache, *padded(prompts(5, 9)), **options)
        assert "\n" not in str(error.value)
        generate(cache, *padded(prompts(5, 9)), guidance_scale=1.0, num_beams=1)


def test_forwards_without_the_cache_are_refused_by_name() -> None:
    cache = cache_of()
    ids = torch.tensor(prompts(9))
    with torch.no_grad(), kvpolicies.attach(tiny(), cache):
        with pytest.raises(UserError, match="use_cache=False is not supported"):
            tiny()(ids, use_cache=False)
        with pytest.raises(UserError, match="without the attached cache"):
            tiny()(ids)
        tiny()(ids, past_key_values=cache)


def test_gradient_checkpointing_is_refused_by_name() -> None:
    model = tiny("llama")
    cache = kvpolicies.FixedBudgetCache(model, "streaming", BUDGET)
    model.gradient_checkpointing_enable()
    model.train()
    try:
        with (
            torch.no_grad(),
            kvpolicies.attach(model, cache),
            pytest.raises(UserError, match="gradient checkpointing is not supported"),
        ):
            model(torch.tensor(prompts(9)), past_key_values=cache)
    finally:
        model.eval()
        model.gradient_checkpointing_disable()


def test_a_gradient_is_refused_where_one_is_wanted() -> None:
    cache = cache_of()
    ids = torch.tensor(prompts(9))
    tiny().requires_grad_(True)  # it is shared by tests
    with kvpolicies.attach(tiny(), cache):
        with pytest.raises(UserError, match="no gradient flows through the cache"):
            tiny()(ids, past_key_values=cache)
        with torch.no_grad():  # the refusal took nothing in
            tiny()(ids, past_key_values=cache)
    assert cache.evicting.rows.seen == [9]


def test_compiled_models_are_refused_by_name() -> None:
    compiled: Any = torch.compile(tiny())
    with pytest.raises(UserError, match=r"a model under torch\.compile is not supported"):
        kvpolicies.FixedBudgetCache(compiled, "streaming", BUDGET)
    with (
        pytest.raises(UserError, match=r"a model under torch\.compile is not supported"),
        kvpolicies.attach(compiled, cache_of()),
    ):
        pass


@pytest.mark.parametrize("name", ["batch_select_indices", "batch_repeat_interleave", "crop"])
def test_what_moves_rows_or_tokens_is_refused_by_name(name: str) -> None:
    argument: Any = torch.tensor([0]) if name == "batch_select_indices" else 2
    with pytest.raises(UserError, match=f"{name} is not supported"):
        getattr(cache_of(), name)(argument)


def test_a_cache_serves_one_conversation() -> None:
    first, longer, other = prompts(20, 30, 40)
    longer = [*first, *longer]
    cache = cache_of("snapkv")
    with kvpolicies.attach(tiny(), cache):
        out = generate(cache, torch.tensor([first]))
        for wrong in (other, first, longer):  # `longer` lacks what was generated
            with pytest.raises(UserError, match=r"another conversation, of 23 tokens a row.*reset"):
                generate(cache, torch.tensor([wrong]))
        assert cache.evicting.rows.seen == [23]
        generate(cache, torch.cat([out, torch.tensor([[3, 4, 5]])], dim=1))
        cache.reset()
        again = generate(cache, torch.tensor([first]))
    assert torch.equal(again, out)


def test_only_the_new_tokens_may_be_given_with_the_mask_of_all() -> None:
    (first,) = prompts(20)
    whole, parts = cache_of("snapkv"), cache_of("snapkv")
    with kvpolicies.attach(tiny(), whole):
        begun = generate(whole, torch.tensor([first]))
        full = torch.cat([begun, torch.tensor([[3, 4, 5]])], dim=1)
        expected = generate(whole, full)[:, full.shape[1] :]
    with kvpolicies.attach(tiny(), parts):
        generate(parts, torch.tensor([first]))
        out = generate(parts, full[:, 23:], torch.ones(1, full.shape[1], dtype=torch.long))
    assert torch.equal(out[:, -4:], expected)


def test_every_position_is_checked_at_any_width() -> None:
    ids = torch.tensor(prompts(21))

    def attempt(positions: list[int], tokens: torch.Tensor) -> None:
        with pytest.raises(UserError, match=r"position_ids give 3 to a token of row 0 .* is 20"):
            tiny()(tokens, position_ids=torch.tensor([positions]), past_key_values=cache)

    cache = cache_of()
    with torch.no_grad(), kvpolicies.attach(tiny(), cache):
        tiny()(ids[:, :20], past_key_values=cache)
        attempt([3], ids[:, 20:])
        attempt([3, 21], torch.tensor([[5, 6]]))
        tiny()(ids[:, 20:], position_ids=torch.tensor([[20]]), past_key_values=cache)
    assert cache.evicting.rows.seen == [21]
    cache = cache_of()
    with torch.no_grad(), kvpolicies.attach(tiny(), cache):
        wrong = torch.arange(9)
        wrong[4] = 7
        with pytest.raises(UserError, match=r"position_ids give 7 to a token of row 0 .* is 4"):
            tiny()(ids[:, :9], position_ids=wrong[None], past_key_values=cache)


def test_a_mask_must_be_that_of_the_conversation() -> None:
    rows, mask = padded(prompts(5, 9))
    cache = cache_of()
    with torch.no_grad(), kvpolicies.attach(tiny(), cache):
        tiny()(rows, attention_mask=mask, past_key_values=cache,
               position_ids=(mask.cumsum(-1) - 1).clamp_min(0))  # fmt: skip
        new = torch.tensor([[5], [6]])
        with pytest.raises(UserError, match=r"attention_mask is \[2, 9\], expected \[2, 10\]"):
            tiny()(new, attention_mask=mask, past_key_values=cache)
        stale = torch.ones(2, 10, dtype=torch.long)
        with pytest.raises(UserError, match=r"marks \[9, 9\] earlier tokens as real.*\[5, 9\]"):
            tiny()(new, attention_mask=stale, past_key_values=cache)
    assert cache.evicting.rows.seen == [5, 9]


def test_a_forward_that_fails_half_way_wants_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of("snapkv")
    ids = torch.tensor(prompts(9))
    with torch.no_grad(), kvpolicies.attach(tiny(), cache):
        with monkeypatch.context() as m:

            def fail(*_: Any) -> None:
                raise RuntimeError("out of memory")

            m.setattr(tiny().model.layers[1].mlp, "forward", fail)
            m.setattr(tiny().model.layers[0].mlp, "forward", fail)
            with pytest.raises(RuntimeError):
                tiny()(ids, past_key_values=cache)
        with pytest.raises(UserError, match="failed half-way"):
            tiny()(ids, past_key_values=cache)
        cache.reset()
        tiny()(ids, past_key_values=cache)


def test_rotations_that_no_trace_tells_are_refused() -> None:
    for call in (
        lambda: kvpolicies.FixedBudgetCache(
            tiny(), "streaming(positions='cache')", BUDGET, max_length=40, trace=True
        ),
        lambda: kvpolicies.generate(
            tiny(), [[5]], "streaming(positions='cache')", BUDGET, max_new_tokens=4, trace=True
        ),
    ):
        with pytest.raises(UserError, match="eviction times do not tell"):
            call()
