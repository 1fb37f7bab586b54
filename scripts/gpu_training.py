"""The learned part of gpu_check.py: a scorer's step and block, and a training step."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from kvpolicies.learned.base import config_for
from kvpolicies.learned.nets import ScorerInput
from kvpolicies.learned.scorer import Scorer
from kvpolicies.models.presets import preset

Row = dict[str, Any]


def scoring(clock: Any, dry: bool) -> Iterator[Row]:
    """One layer's scorer on one new token of each row, and on a block of them."""
    model = _model("small" if dry else "qwen3-4b", torch.device("meta"), torch.float32)
    rows, block = (2, 8) if dry else (64, 256)
    for kind in _kinds():
        config = config_for(model, kind, window=block)
        scorer = Scorer(config).to(clock.device)
        state = {
            name: torch.zeros(rows, *shape, device=clock.device)
            for name, shape in config.state_shapes.items()
        }
        times = {}
        for n in (1, block):
            seen = torch.randn(rows, config.heads, n, 2 * config.head_dim, device=clock.device)
            times[n] = clock.ms(
                lambda s=scorer, x=seen, c=state: s.advance(0, ScorerInput(x, x), c)
            )
        yield {
            "check": f"{kind}, a layer's scores, {rows} rows x {config.heads} heads",
            "ok": True,
            "ms a token": round(times[1], 4),
            f"ms a block of {block}": round(times[block], 4),
        }


def training(clock: Any, dry: bool) -> Iterator[Row]:
    """A training step of recipe `frozen` on a row of packed tokens, random weights."""
    if importlib.util.find_spec("lightning") is None:
        yield {"check": "training step", "ok": None, "note": "lightning is not installed"}
        return
    from kvpolicies.train.module import Frozen
    from kvpolicies.train.recipe import Recipe

    name, dtype = ("small", torch.float32) if dry else ("qwen3-0.6b", torch.bfloat16)
    length = 160 if dry else 16_384
    model = _model(name, clock.device, dtype)
    tokens = torch.randint(3, model.config.vocab_size, (1, length), device=clock.device)
    documents = torch.arange(2, device=clock.device).repeat_interleave(length // 2)[None]
    for kind in _kinds():
        recipe = Recipe(kind=kind, sequence=length, budget=(64 if dry else 1024,), batch=1)
        config = config_for(model, kind, window=recipe.lag)
        scorer = Scorer(config).to(clock.device)
        module = Frozen(model, scorer, recipe)

        def step(trained: Frozen = module) -> None:
            with torch.enable_grad():
                trained.step(tokens, documents)[1].backward()

        if not dry:
            torch.cuda.reset_peak_memory_stats()
        ms = clock.ms(step, repeats=3)
        finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in scorer.parameters())
        yield {
            "check": f"training step, {name}, {kind}, {length} tokens",
            "ok": finite,
            "ms": round(ms, 1),
            "tokens/s": round(1000 * length / ms),
            "peak GB": None if dry else round(torch.cuda.max_memory_allocated() / 1e9, 2),
        }


def _kinds() -> list[str]:
    """kvpop where its recurrent cell is at hand, and what needs none."""
    return ["kvpop"] * (importlib.util.find_spec("xlstm") is not None) + ["kvpop_mlp"]


def _model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(preset(name), dtype=dtype).eval()
