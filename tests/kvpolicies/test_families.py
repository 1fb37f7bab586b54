"""More architectures and rotations: full is transformers' own, and replays hold."""

from typing import Any

import pytest
import torch
import transformers

import kvpolicies
from kvpolicies.architecture import attention_modules
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
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 128,
}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 12}
GEMMA = {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24}
HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
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
    "mistral, sliding": ("Mistral", {"sliding_window": 12}),
    "phi3, partial rotation": ("Phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "phi3, LongRoPE within its original length": (
        "Phi3",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": 128,
            "pad_token_id": 0,
        },
    ),
    "gemma2, soft-capped": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 2.0, "layer_types": HYBRID},
    ),
    "gemma3, a rotation a kind of layer": ("Gemma3", {**GEMMA, "layer_types": HYBRID}),
    "gpt-oss, sinks": ("GptOss", {**GPT_OSS, "layer_types": HYBRID}),
    "smollm3, layers without positions": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    ),
}


def model_of(case: str) -> Any:
    return made(*CASES[case])


def made(family: str, options: dict[str, Any]) -> Any:
    named = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, named)(
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
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    # The eager form is the one that knows sinks and soft-capping.
    model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 1.0, 1.0)
    return model


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
    policy = "full" if case == "mistral, sliding" else "beacon(n_beacon=4, n_recent=4)"
    out = kvpolicies.generate(
        model,
        PROMPTS,
        policy,
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
    assert policy == "full" or all(g.max_slots == 32 for g in out)


@pytest.mark.parametrize("case", CASES)
def test_queries_before_rope_are_recovered(case: str) -> None:
    """What a layer's RoPE gives back is what its projection (and norm) made."""
    from kvpolicies import adapter
    from kvpolicies.cache import FixedBudgetCache

    model, seen = model_of(case), []

    real = FixedBudgetCache.attend

    def spy(cache: FixedBudgetCache, layer: int, given: Any) -> torch.Tensor:
        n, rope = given.queries.shape[3], cache.ropes[layer]
        rope.prepare(n, given.queries.device)
        seen.append(rope.unrotate(given.queries, torch.arange(n)[None]))
        return real(cache, layer, given)

    rotate: Any = adapter.inspect.getmodule(type(attention_modules(model)[0]))
    raw: list[torch.Tensor] = []
    original = rotate.apply_rotary_pos_emb

    def apply(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.shape[2] == len(PROMPTS[0]):  # and not a trial of the function itself
            raw.append(q)
        return original(q, *args, **kwargs)

    patch = pytest.MonkeyPatch()
    with patch.context() as m:
        m.setattr(FixedBudgetCache, "attend", spy)
        m.setattr(rotate, "apply_rotary_pos_emb", apply)
        kvpolicies.generate(model, [PROMPTS[0]], "full", 1, max_new_tokens=1, eos_token_id=-1)
    rotated = [s for s, r in zip(seen, _uses(model), strict=True) if r]
    assert len(rotated) == len(raw) > 0
    for ours, theirs in zip(rotated, raw, strict=True):
        scale = theirs.abs().max()
        assert (ours.flatten(1, 2) - theirs).abs().max() / scale < 1e-5


def _uses(model: Any) -> list[bool]:
    return [bool(getattr(m, "use_rope", True)) for m in attention_modules(model)]


def test_rotations_that_change_with_the_length_are_refused_where_they_matter() -> None:
    scaled = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
    model = made("Llama", {"rope_parameters": scaled, "max_position_embeddings": 64})
    with pytest.raises(UserError, match="a sequence of 70 tokens: beyond 64"):
        kvpolicies.generate(model, PROMPTS, "beacon", 40, max_new_tokens=10)
    kvpolicies.generate(model, PROMPTS, "beacon", 40, max_new_tokens=2, eos_token_id=-1)
    kvpolicies.generate(model, PROMPTS, "snapkv", 40, max_new_tokens=10)


def test_a_model_of_sliding_windows_alone_has_nothing_to_evict() -> None:
    model = model_of("mistral, sliding")
    with pytest.raises(UserError, match="sliding window of 12 tokens"):
        kvpolicies.generate(model, PROMPTS, "streaming", 40, max_new_tokens=2)


def test_sliding_layers_keep_a_cache_of_their_own() -> None:
    """Bounded by the window and not by the budget, and not counted against it."""
    model = model_of("gpt-oss, sinks")
    cache = kvpolicies.FixedBudgetCache(model, "streaming", Budget(30, 2, 8))
    cache.allocate(2, torch.float32, torch.device("cpu"))
    assert [cache.groups[g].geometry.slots for g, _ in cache.layer_index] == [23, 30, 23]
    (out,) = kvpolicies.generate(
        model, PROMPTS[1:], "streaming", Budget(30, 2, 8), max_new_tokens=40, trace=True
    )
    assert out.max_slots == 30 and out.trace is not None
    held = out.trace.cache_length(90)[0]
    assert held[0].tolist() == [12, 12] and held[1].tolist() == [30, 30]


def test_query_heads_that_cannot_share_their_kv_heads_are_refused_by_name() -> None:
    model = made("Llama", {})
    model.config.num_key_value_heads = 3
    with pytest.raises(UserError, match="4 query heads cannot share 3 KV heads evenly"):
        kvpolicies.generate(model, [[1, 2, 3]], "streaming", 32, max_new_tokens=2)
