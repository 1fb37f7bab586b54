"""More architectures and rotations: full is transformers' own, and replays hold."""

from typing import Any

import pytest
import torch
import transformers

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from tests.support.models import VOCABULARY, prompts

PROMPTS = prompts(9, 60)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, YaRN": ("Llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "llama, Llama-3 scaling": ("Llama", {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}}),
    "llama, wide heads": ("Llama", {"head_dim": 32}),
    "llama, one KV head": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3, no groups": ("Qwen3", {"num_key_value_heads": 4}),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "phi3, partial rotation": ("Phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "smollm3, layers without positions": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    ),
}


def model_of(case: str) -> Any:
    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            **options,
        }
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("case", CASES)
def test_full_is_transformers_own_generation(case: str) -> None:
    model = model_of(case)
    ours = kvpolicies.generate(model, PROMPTS, "full", 1, max_new_tokens=25, eos_token_id=-1)
    for prompt, generation in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=25,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert generation.tokens == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_replay(case: str) -> None:
    model, decoded = model_of(case), {}
    out = kvpolicies.generate(
        model,
        PROMPTS,
        "beacon(n_beacon=4, n_recent=4)",
        Budget(32, 2, 8),
        max_new_tokens=40,
        eos_token_id=-1,
        trace=True,
        on_logits=lambda r, step, row: decoded.__setitem__((r, step), row),
    )
    traces = [g.trace for g in out if g.trace is not None]
    logits = kvpolicies.replay(model, kvpolicies.EvictionTrace.stack(traces))
    worst = max(
        (logits[r, len(PROMPTS[r]) - 1 + step] - row).abs().max() / row.abs().max()
        for (r, step), row in decoded.items()
    )
    assert worst <= 1e-4
    assert all(g.max_slots == 32 for g in out)


@pytest.mark.parametrize("case", CASES)
def test_queries_before_rope_are_recovered(case: str) -> None:
    """What a layer's RoPE gives back is what its projection (and norm) made."""
    from kvpolicies import adapter
    from kvpolicies.steps import process as real

    model, seen = model_of(case), []

    def spy(layer: Any, tokens: Any, rows: Any, counts: Any) -> torch.Tensor:
        n = tokens.queries.shape[3]
        layer.rope.prepare(n, tokens.queries.device)
        seen.append(layer.rope.unrotate(tokens.queries, torch.arange(n)[None]))
        return real(layer, tokens, rows, counts)

    rotate: Any = adapter.inspect.getmodule(type(adapter._attention_modules(model)[0]))
    raw: list[torch.Tensor] = []
    original = rotate.apply_rotary_pos_emb

    def apply(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raw.append(q)
        return original(q, *args, **kwargs)

    patch = pytest.MonkeyPatch()
    with patch.context() as m:
        m.setattr(adapter, "process", spy)
        m.setattr(rotate, "apply_rotary_pos_emb", apply)
        kvpolicies.generate(model, [PROMPTS[0]], "full", 1, max_new_tokens=1, eos_token_id=-1)
    rotated = [s for s, r in zip(seen, _uses(model), strict=True) if r]
    assert len(rotated) == len(raw) > 0
    for ours, theirs in zip(rotated, raw, strict=True):
        scale = theirs.abs().max()
        assert (ours.flatten(1, 2) - theirs).abs().max() / scale < 1e-5


def _uses(model: Any) -> list[bool]:
    from kvpolicies.adapter import _attention_modules

    return [bool(getattr(m, "use_rope", True)) for m in _attention_modules(model)]


def test_rotations_that_change_with_the_length_are_refused_where_they_matter() -> None:
    CASES["dynamic"] = (
        "Llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
    )
    model = model_of("dynamic")
    del CASES["dynamic"]
    with pytest.raises(UserError, match="dynamic"):
        kvpolicies.generate(model, PROMPTS, "beacon", 40, max_new_tokens=2)
    kvpolicies.generate(model, PROMPTS, "snapkv", 40, max_new_tokens=2)
