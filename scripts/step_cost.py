"""How far a decode step is from what the machine allows: against a step written out by hand.

    OMP_NUM_THREADS=1 python scripts/step_limit.py [--new 512] [--policies streaming,beacon]

The hand-written step computes the same model (8 layers of width 256, 8 query and 2 KV heads of 64)
on 512 slots whose oldest is overwritten: no policy, no cache object, no module calls. It runs eager
and compiled by torch.compile; so do ours. Prints tokens/s, and each as a share of the compiled
limit. Compare within one run only.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvpolicies.decoding import generate
from kvpolicies.eval.laps import Mark, fastest, stopwatch, watched
from kvpolicies.eval.presets import preset

BATCH, SLOTS = 4, 512


def hand_written(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(tokens [B, 1], position [1]) -> logits [B, V], from the model's own weights."""
    weights = {name: w.detach() for name, w in model.named_parameters()}
    config = model.config
    h, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    keys, values = (
        [torch.randn(BATCH, kv, SLOTS, d) for _ in range(config.num_hidden_layers)]
        for _ in range(2)
    )
    base = config.rope_parameters["rope_theta"]
    frequency = base ** (-torch.arange(0, d, 2).float() / d)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name], config.rms_norm_eps)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin

    def layer(i: int, x: Tensor, cos: Tensor, sin: Tensor, slot: Tensor) -> Tensor:
        p = f"model.layers.{i}."
        y = norm(x, p + "input_layernorm.weight")
        q, k, v = (F.linear(y, weights[f"{p}self_attn.{n}_proj.weight"]) for n in "qkv")
        q = norm(q.view(BATCH, kv, h // kv, d), p + "self_attn.q_norm.weight")
        k = norm(k.view(BATCH, kv, 1, d), p + "self_attn.k_norm.weight")
        keys[i].index_copy_(2, slot, rotate(k, cos, sin))
        values[i].index_copy_(2, slot, v.view(BATCH, kv, 1, d))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), keys[i], values[i])
        x = x + F.linear(out.reshape(BATCH, h * d), weights[p + "self_attn.o_proj.weight"])
        y = norm(x, p + "post_attention_layernorm.weight")
        gate, up = (F.linear(y, weights[f"{p}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, weights[p + "mlp.down_proj.weight"])

    def step(tokens: Tensor, position: Tensor) -> Tensor:
        angle = position[:, None] * frequency
        angle = torch.cat([angle, angle], dim=-1)
        x = F.embedding(tokens[:, 0], weights["model.embed_tokens.weight"])
        for i in range(config.num_hidden_layers):
            x = layer(i, x, angle.cos(), angle.sin(), position % SLOTS)
        return F.linear(norm(x, "model.norm.weight"), weights["model.embed_tokens.weight"])

    return step


@torch.no_grad()
def decode(step: Callable[[Tensor, Tensor], Tensor], new: int, mark: Callable[[int], None]) -> None:
    """Greedy decoding by `step`, from a first token."""
    mark(0)
    tokens = torch.zeros(BATCH, 1, dtype=torch.long)
    mark(1)
    for position in range(new - 1):
        logits = step(tokens, torch.tensor([SLOTS + position]))
        tokens = logits.argmax(dim=-1, keepdim=True)
        tokens.tolist()
        mark(position + 2)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--new", type=int, default=512, help="new tokens a row")
    parser.add_argument("--policies", default="streaming,beacon")
    parser.add_argument("--rounds", type=int, default=3, help="the fastest windows of them count")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(preset("small")).eval()
    step = hand_written(model)
    compiled = torch.compile(step, dynamic=False)
    prompts = torch.randint(3, model.config.vocab_size, (BATCH, SLOTS)).tolist()
    runs: dict[str, list[list[Mark]]] = {}
    for _ in range(args.rounds):  # round by round, so that all meet the same company
        for name, way in (("by hand, eager", step), ("by hand, compiled", compiled)):
            marks, mark = stopwatch(torch.device("cpu"))
            decode(way, args.new, mark)
            runs.setdefault(name, []).append(marks)
        for policy, mode in itertools.product(args.policies.split(","), ("eager", "compiled")):
            marks, mark = stopwatch(torch.device("cpu"))
            mark(0)
            with watched(mark):
                generate(
                    model, prompts, policy, SLOTS, max_new_tokens=args.new, eos_token_id=-1,
                    step=mode,
                )  # fmt: skip
            runs.setdefault(f"{policy}, {mode}", []).append(marks)
    speeds = {name: fastest(marks, window=32) for name, marks in runs.items()}
    most = BATCH * speeds["by hand, compiled"].steps / speeds["by hand, compiled"].wall
    for name, speed in speeds.items():
        rate = BATCH * speed.steps / speed.wall
        first = f"first step {speed.first_step_s:5.1f} s"
        print(f"{name:22} {rate:8.1f} tokens/s {rate / most:6.2f} of the compiled limit, {first}")


if __name__ == "__main__":
    main()
