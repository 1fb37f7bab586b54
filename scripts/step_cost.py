"""What a decode step costs: ours, transformers', kvpress' and one written out by hand, in turns.

    OMP_NUM_THREADS=1 python scripts/step_cost.py [--batch 8] [--slots 256] [--new 400]
        [--policies streaming,beacon,rkv,snapkv] [--kvpress PYTHON] [--compiled]

All compute the same model (8 layers of width 256, 8 query and 2 KV heads of 64, random weights) in
float32 from prompts of `--slots` tokens. The hand-written step overwrites the oldest of its slots:
no policy, no cache object, no module calls. It is the limit of what an eager step can be.
`transformers, full` grows. kvpress needs an older transformers: `--kvpress` is the interpreter
of an environment that has it (`pip install kvpress`); without one its rows are left out, and said
to be. It evicts 128 at once. At equal peak slots it keeps `--slots` - 128, at equal average slots
as many more as make its mean that of a policy of ours that evicts an eighth of its slots.

Prints milliseconds of processor time a step, all threads, of the fastest windows of all rounds, as
other processes only ever make a step slower; and the hand-written step's share of it (1 = as fast).
Compare within one run only.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS, HEADS, KV_HEADS, SIZE = 8, 8, 2, 64
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "vocab_size": 1024,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
INTERVAL = 128  # tokens between two evictions of kvpress
WINDOW = 64  # decode steps of which the fastest round counts

Marks = list[float]


class Setting:
    """The model, the prompts, and how much is generated."""

    def __init__(self, batch: int, slots: int, new: int):
        torch.manual_seed(0)
        self.batch, self.slots, self.new = batch, slots, new
        self.model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen3", **CONFIG)
        ).eval()
        self.prompts = torch.randint(3, CONFIG["vocab_size"], (batch, slots))  # type: ignore[call-overload]


def hand_written(given: Setting) -> Callable[[Tensor, Tensor], Tensor]:
    """(tokens [B, 1], position [1]) -> logits [B, V], from the model's own weights."""
    model, b = given.model, given.batch
    weights = {name: w.detach() for name, w in model.named_parameters()}
    h, kv, d, eps = HEADS, KV_HEADS, SIZE, model.config.rms_norm_eps
    keys, values = ([torch.randn(b, kv, given.slots, d) for _ in range(LAYERS)] for _ in range(2))
    base = model.config.rope_parameters["rope_theta"]
    frequency = base ** (-torch.arange(0, d, 2).float() / d)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name], eps)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-other, one], dim=-1) * sin

    def layer(i: int, x: Tensor, cos: Tensor, sin: Tensor, slot: Tensor) -> Tensor:
        p = f"model.layers.{i}."
        y = norm(x, p + "input_layernorm.weight")
        q, k, v = (F.linear(y, weights[f"{p}self_attn.{n}_proj.weight"]) for n in "qkv")
        q = norm(q.view(b, kv, h // kv, d), p + "self_attn.q_norm.weight")
        k = norm(k.view(b, kv, 1, d), p + "self_attn.k_norm.weight")
        keys[i].index_copy_(2, slot, rotate(k, cos, sin))
        values[i].index_copy_(2, slot, v.view(b, kv, 1, d))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), keys[i], values[i])
        x = x + F.linear(out.reshape(b, h * d), weights[p + "self_attn.o_proj.weight"])
        y = norm(x, p + "post_attention_layernorm.weight")
        gate, up = (F.linear(y, weights[f"{p}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, weights[p + "mlp.down_proj.weight"])

    def step(tokens: Tensor, position: Tensor) -> Tensor:
        angle = position[:, None] * frequency
        angle = torch.cat([angle, angle], dim=-1)
        cos, sin = angle.cos(), angle.sin()
        x = F.embedding(tokens[:, 0], weights["model.embed_tokens.weight"])
        for i in range(LAYERS):
            x = layer(i, x, cos, sin, position % given.slots)
        return F.linear(norm(x, "model.norm.weight"), weights["model.embed_tokens.weight"])

    return step


@torch.no_grad()
def by_hand(given: Setting, step: Callable[[Tensor, Tensor], Tensor]) -> Marks:
    """Greedy decoding by the hand-written step."""
    marks: Marks = []
    tokens = torch.zeros(given.batch, 1, dtype=torch.long)
    for position in range(given.slots, given.slots + given.new):
        tokens = step(tokens, torch.tensor([position])).argmax(dim=-1, keepdim=True)
        tokens.tolist()
        marks.append(time.process_time())
    return marks


@torch.no_grad()
def of_transformers(given: Setting, press: str | None = None, kept: int = 0) -> Marks:
    """Its own generation, from which a press of kvpress evicts, if one is named."""
    marks: Marks = []
    hook = given.model.register_forward_hook(lambda *_: marks.append(time.process_time()))
    evicting: Any = nullcontext()
    if press:
        import kvpress  # type: ignore[import-not-found]

        base = getattr(kvpress, press)()
        evicting = kvpress.DecodingPress(base, compression_interval=INTERVAL, target_size=kept)
        evicting = evicting(given.model)
    with evicting:
        given.model.generate(
            given.prompts,
            attention_mask=torch.ones_like(given.prompts),
            max_new_tokens=given.new,
            min_new_tokens=given.new,
            do_sample=False,
        )
    hook.remove()
    return marks


def ours(given: Setting, policy: str, mode: str) -> Marks:
    """The decode loop of kvpolicies."""
    from kvpolicies.decoding import generate

    marks: Marks = []
    generate(
        *(given.model, given.prompts.tolist(), policy, given.slots),
        max_new_tokens=given.new,
        eos_token_id=-1,
        step=mode,
        on_logits=lambda row, *_: marks.append(time.process_time()) if row == 0 else None,
    )
    return marks


class Peer:
    """This script in an environment that has kvpress: answers a line of JSON with another."""

    def __init__(self, python: str, arguments: list[str]):
        self.process = subprocess.Popen(
            [python, __file__, "--peer", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.versions = self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise SystemExit("step_cost: the environment of --kvpress failed: see above")

    def __call__(self, press: str | None, kept: int) -> Marks:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([press, kept]) + "\n")
        self.process.stdin.flush()
        return self._line()


def answer(given: Setting) -> None:
    """What the peer does: one generation for each line that comes in."""
    from importlib.metadata import version

    print(json.dumps({name: version(name) for name in ("kvpress", "transformers")}), flush=True)
    for line in sys.stdin:
        print(json.dumps(of_transformers(given, *json.loads(line))), flush=True)


def contenders(given: Setting, args: Any) -> dict[str, Callable[[], Marks]]:
    """Who takes part, by what the table calls them."""
    step = hand_written(given)
    ways: dict[str, Callable[[], Marks]] = {"by hand": lambda: by_hand(given, step)}
    if args.compiled:
        compiled = torch.compile(hand_written(given), dynamic=False)
        ways["by hand, compiled"] = lambda: by_hand(given, compiled)
    ways["transformers, full"] = lambda: of_transformers(given)
    for policy in args.policies.split(","):
        for mode in ("eager", "compiled") if args.compiled else ("eager",):
            name = policy if mode == "eager" else f"{policy}, compiled"
            ways[name] = partial(ours, given, policy, mode)
    if not args.kvpress:
        print("kvpress: left out; --kvpress names an interpreter that has it")
        return ways
    sizes = [str(x) for x in ("--batch", args.batch, "--slots", args.slots, "--new", args.new)]
    peer = Peer(args.kvpress, sizes)
    print("kvpress' environment:", ", ".join(f"{k} {v}" for k, v in peer.versions.items()))
    average = given.slots - given.slots // 16 - INTERVAL // 2
    for press in args.presses.split(","):
        ways[f"kvpress {press}, equal peak"] = partial(peer, press, given.slots - INTERVAL)
        ways[f"kvpress {press}, equal average"] = partial(peer, press, average)
    return ways


def milliseconds(runs: list[Marks]) -> float:
    """Of a step: each window's fastest round counts."""
    ends = [*range(1, len(runs[0]) - 1, WINDOW), len(runs[0]) - 1]
    fastest = (min(run[b] - run[a] for run in runs) for a, b in pairwise(ends))
    return 1e3 * sum(fastest) / (ends[-1] - ends[0])


def main() -> None:
    """Runs all of them, round by round, so that all meet the same company; prints the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--new", type=int, default=400, help="new tokens a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", default="streaming,beacon,rkv,snapkv,tova,h2o")
    parser.add_argument("--presses", default="StreamingLLMPress,SnapKVPress")
    parser.add_argument("--kvpress", metavar="PYTHON", help="interpreter of its environment")
    parser.add_argument("--compiled", action="store_true", help="compiled steps too")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    given = Setting(args.batch, args.slots, args.new)
    if args.peer:
        answer(given)
        return
    runs: dict[str, list[Marks]] = {}
    ways = contenders(given, args)
    starts: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            runs.setdefault(name, []).append(way())
            starts.setdefault(name, time.perf_counter() - begin)
    costs = {name: milliseconds(marks) for name, marks in runs.items()}
    print(f"\nbatch {args.batch}, {args.slots} slots, {args.new} new tokens: processor time a step")
    for name, cost in costs.items():
        share = costs["by hand"] / cost
        print(f"{name:40} {cost:7.2f} ms {share:6.2f}   first run {starts[name]:6.1f} s")


if __name__ == "__main__":
    main()
