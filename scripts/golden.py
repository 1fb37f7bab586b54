"""tests/reference/golden: what the authors' own code keeps, on fixed keys and queries.

    python scripts/golden.py snapkv=PATH rpc=PATH ...
    python scripts/golden.py inputs

PATH is a checkout of the code that AUTHORS names; its classes are run from there, and nothing of it
is kept but the figures: for each head and token the position of the first query that no longer sees
it. Only the files named are read, so that nothing which they import need be installed. `inputs`
draws the keys and queries anew, and all figures must follow.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import os
import subprocess
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "reference" / "golden"
SEQUENCES, HEADS, TOKENS, DIM, SEED = 12, 4, 128, 16, 20261201
NEVER = 255
SCALE = 16
"""Keys and queries are whole sixteenths, and a byte each in the file."""

Compress = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(keys, values [1, H, L, D], newest position) -> those that stay."""


class Inputs:
    """Keys [1, H, T, D] and queries [1, Hq, T, D] of one sequence.

    The first number of a value is its token's position, so that whatever stays says what it is.

    Args:
        group: query heads a KV head; of the KV heads the first ones are used.
        repeat: KV heads are repeated for their query heads, as code does that knows no groups.
    """

    def __init__(self, number: int, group: int = 1, repeat: bool = False):
        with np.load(GOLDEN / "inputs.npz") as file:
            both = [file[name][number].astype(np.float32) / SCALE for name in ("keys", "queries")]
        keys, self.queries = (torch.tensor(x)[None] for x in both)
        keys = keys[:, : HEADS // group]
        self.keys = keys.repeat_interleave(group, 1) if repeat else keys
        self.values = torch.zeros_like(self.keys)
        self.values[..., 0] = torch.arange(TOKENS)

    def weights(self, keys: Tensor, first: int, newest: int) -> Tensor:
        """Attention [1, Hq, n, L] of queries first .. newest, of which `newest` sees all."""
        keys = keys.repeat_interleave(HEADS // keys.shape[1], 1)
        logits = self.queries[:, :, first : newest + 1] @ keys.transpose(2, 3) / DIM**0.5
        later = torch.ones(logits.shape[-2:]).triu(1 + keys.shape[2] - logits.shape[2]).bool()
        return logits.masked_fill(later, float("-inf")).softmax(-1)

    def decode(self, prompt: int, compress: Compress) -> np.ndarray:
        """Prompt, then token by token, `compress` after each forward: eviction times [H, T]."""
        times = np.full((self.keys.shape[1], TOKENS), NEVER, dtype=np.uint8)
        keys, values = self.keys[:, :, :prompt], self.values[:, :, :prompt]
        for newest in range(prompt - 1, TOKENS - 1):
            if newest >= prompt:
                keys = torch.cat([keys, self.keys[:, :, newest : newest + 1]], dim=2)
                values = torch.cat([values, self.values[:, :, newest : newest + 1]], dim=2)
            before = values[0, :, :, 0].int().numpy()
            keys, values = compress(keys, values, newest)
            for h, kept in enumerate(values[0, :, :, 0].int().numpy()):
                times[h, np.setdiff1d(before[h], kept)] = newest + 1
        return times


class Stub:
    """Stands for base classes of libraries that need not be installed."""

    def __init__(self) -> None:
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []


def defined(root: Path, files: list[str], names: list[str]) -> SimpleNamespace:
    """Classes, functions and tables of these names, as their files define them, and no more."""
    space: dict[str, Any] = {**vars(typing), "dataclass": dataclasses.dataclass}
    space |= dict(Cache=Stub, TriAttentionConfig=Stub)
    space |= dict(torch=torch, F=F, nn=torch.nn, math=math, DynamicCache=Stub, BasePress=Stub)
    space["ExpectedAttentionPress"] = type("Absent", (), {})
    for file in files:
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if set(_named(node)) & set(names)]
        exec(compile(tree, file, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def _named(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    else:
        yield getattr(node, "name", "")


def streaming(theirs: SimpleNamespace, x: Inputs, start: int, recent: int) -> Compress:
    cache = theirs.StartRecentKVCache(start, recent)
    return lambda keys, values, newest: cache([[keys, values]])[0]


def tova(theirs: SimpleNamespace, x: Inputs, size: int) -> Compress:
    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        cache = theirs.TOVACache(size)
        cache.key_cache, cache.value_cache = [keys], [values]
        cache.reduce(0, x.weights(keys, newest, newest))
        return cache.key_cache[0], cache.value_cache[0]

    return compress


def h2o(theirs: SimpleNamespace, x: Inputs, heavy: int, recent: int) -> Compress:
    cache = theirs.H2OKVCache_LayerWise(heavy, recent)

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        first = 0 if cache.hh_score is None else newest
        return cache((keys, values), x.weights(keys, first, newest))

    return compress


def keydiff(theirs: SimpleNamespace, x: Inputs, size: int, drop: int) -> Compress:
    press = theirs.KeyDiffPress(compression_ratio=drop / size)
    module = SimpleNamespace(head_dim=DIM)

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        if keys.shape[2] < size:
            return keys, values
        return press.compress(module, None, keys, values, None, {})

    return compress


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [..., D] of positions [...]: base 10,000, pairs (i, i + D/2)."""
    angle = positions[..., None] * 10_000.0 ** (-2 * torch.arange(DIM // 2) / DIM)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def expected(theirs: SimpleNamespace, x: Inputs, size: int, drop: int, ahead: int) -> Compress:
    """Queries are taken as rotated. What stays is put in order of position: theirs finds its sinks
    by slot, and takes what stays in order of score."""
    press = theirs.ExpectedAttentionPress(drop / size, n_future_positions=ahead)
    cos, sin = rotary(torch.arange(TOKENS))
    first, second = x.queries.chunk(2, dim=-1)
    raw = x.queries * cos - torch.cat([-second, first], dim=-1) * sin
    found = type(press).get_query_statistics.__globals__
    found["repeat_kv"] = lambda keys, n: keys.repeat_interleave(n, 1)
    found["get_prerope_query_states"] = lambda _, hidden: raw[:, :, 4 : 4 + hidden.shape[1]]
    module = SimpleNamespace(
        head_dim=DIM,
        rotary_emb=lambda _, positions: rotary(positions),
        config=SimpleNamespace(num_attention_heads=HEADS),
    )

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        if keys.shape[2] < size:
            return keys, values
        hidden = torch.empty(1, newest + 1, 0)
        keys, values = press.compress(module, hidden, keys, values, None, {})
        order = values[..., :1].argsort(dim=2).expand_as(values)
        return keys.gather(2, order), values.gather(2, order)

    return compress


def criticalkv(theirs: SimpleNamespace, x: Inputs, prompt: int, size: int, window: int) -> Compress:
    """Over SnapKV, with the output projection that tests/reference draws."""
    heads = x.keys.shape[1]
    output = np.random.default_rng(7).standard_normal((HEADS * DIM, 12)).astype(np.float32)
    press = theirs.CriticalKVPress(theirs.SnapKVPress(window_size=window, kernel_size=5))
    type(press).score.__globals__["repeat_kv"] = lambda keys, n: keys.repeat_interleave(n, 1)
    module = SimpleNamespace(
        head_dim=DIM,
        num_key_value_groups=HEADS // heads,
        o_proj=SimpleNamespace(weight=torch.tensor(output).T),
        config=SimpleNamespace(
            num_attention_heads=HEADS, num_key_value_heads=heads, head_dim=DIM, hidden_size=12
        ),
    )

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        if newest >= prompt:  # it compresses prompts alone
            return keys, values
        press.compression_ratio = 1 - (size + 0.25) / keys.shape[2]
        hidden, attention = torch.empty(1, newest + 1, 0), x.weights(keys, 0, newest)
        return press.compress(module, hidden, keys, values, attention, {})

    return compress


def triattention(
    theirs: SimpleNamespace, x: Inputs, prompt: int, size: int, buffer: int
) -> Compress:
    """Its selection of each layer and KV head apart, scores standardised. Statistics are of the
    sequence's own queries, taken as rotated."""
    cos, sin = rotary(torch.arange(TOKENS))
    raw = theirs.to_complex_pairs(theirs.invert_rope(x.queries[0], cos, sin, 1.0).flatten(0, 1))
    raw = raw.view(HEADS, TOKENS, DIM // 2)
    own = object.__new__(theirs.TriAttention)
    heads, group = [(0, h) for h in range(HEADS)], HEADS // x.keys.shape[1]
    stats = {
        (0, h): theirs.HeadFrequencyStats(raw[h].mean(0), raw[h].abs().mean(0)) for _, h in heads
    }
    vars(own).update(
        sampled_heads=heads, head_stats=stats, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // group, num_key_value_groups=group, head_dim=DIM,
        config=SimpleNamespace(
            device=torch.device("cpu"), dtype=torch.float32, layer_perhead_aggregation="max"
        ),
        normalize_scores=True, generator=None, attention_scale=1.0, rope_style="half",
        rotary=lambda _, positions: rotary(positions), disable_mlr=False, disable_trig=False,
        omega=10_000.0 ** (-2 * torch.arange(DIM // 2) / DIM),
        offsets=theirs.build_geometric_offsets(65536, torch.device("cpu")),
        score_aggregation="mean", freq_scale_sq=torch.ones(DIM // 2),
        cache_positions_per_layer_perhead=None,
    )  # fmt: skip

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        if keys.shape[2] < size + buffer or newest < prompt:
            return keys, values
        at = values[0, :, :, 0].long()
        own.absolute_position = newest + 1
        own.cache_positions_per_layer_perhead = {(0, h): row.tolist() for h, row in enumerate(at)}
        given = (((keys, values),), size - prompt, prompt, at[0, prompt:])
        kept = own._select_per_layer_perhead_independent(*given)[0].sort().values
        wide = kept[None, :, :, None].expand(-1, -1, -1, DIM)
        return keys.gather(2, wide), values.gather(2, wide)

    return compress


def longflow(theirs: SimpleNamespace, x: Inputs, size: int) -> Compress:
    """Its Triton kernel, under Triton's interpreter."""

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        if keys.shape[2] < size:
            return keys, values
        goes = theirs.evicted(x.queries[:, :, newest : newest + 1], keys, values)
        stays = torch.arange(size) != goes
        return keys[:, :, stays], values[:, :, stays]

    return compress


def longflow_kernel(root: Path) -> SimpleNamespace:
    """`evicted`(query, keys, values) -> slot, by the module as it is: Triton reads its source."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    spec = importlib.util.spec_from_file_location("longflow", root / "triton_kernel/attention.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class OnDevice(Tensor):
        """The kernel's launcher asks for a GPU; the interpreter needs none."""

        is_cuda = True  # type: ignore[assignment]

    def evicted(query: Tensor, keys: Tensor, values: Tensor) -> int:
        mask = torch.ones(1, keys.shape[2], dtype=torch.bool)
        given = (x.contiguous().as_subclass(OnDevice) for x in (query, keys, values, mask))
        group = query.shape[1] // keys.shape[1]
        return int(module.triton_evict_attention_forward(*given, group, DIM**-0.5)[1])

    return SimpleNamespace(evicted=evicted)


def snapkv(theirs: SimpleNamespace, x: Inputs, prompt: int, size: int, window: int) -> Compress:
    cluster = theirs.SnapKVCluster(window, size, kernel_size=5, pooling="avgpool")

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        if newest >= prompt:  # it compresses prompts alone
            return keys, values
        return cluster.update_kv(keys, x.queries[:, :, :prompt], values, None, 1)

    return compress


def rpc(
    theirs: SimpleNamespace, x: Inputs, prompt: int, P: int, R: int, c: int, as_run: bool
) -> Compress:
    """`as_run`: the queries that its attention layers gather, else the R newest, each once."""
    cluster = theirs.RPCCluster(P=P, R=R, c=c, num_key_value_groups=HEADS // x.keys.shape[1])
    cluster.prompt_len = prompt

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        since = keys.shape[2] - 1 - prompt - cluster.num_comp * cluster.T - R
        query = x.queries[:, :, newest : newest + 1]
        if as_run and since > P - R:
            cluster.cache_recent(query)
        if since < P - 1:
            return keys, values
        query = query if as_run else x.queries[:, :, newest + 1 - R : newest + 1]
        kept = cluster.compress_kv(keys, values, query)
        cluster.num_comp += 1
        return kept

    return compress


def rkv(theirs: SimpleNamespace, x: Inputs, size: int, buffer: int, window: int) -> Compress:
    cluster = theirs.R1KV(size, window, kernel_size=7, mix_lambda=0.1, retain_direction="last")

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        if keys.shape[2] < size + buffer:
            return keys, values
        return cluster.update_kv(keys, x.queries[:, :, newest + 1 - window : newest + 1], values)

    return compress


def gkv(theirs: SimpleNamespace, x: Inputs, size: int, buffer: int, window: int) -> Compress:
    """Its importance alone: redundancy is R-KV's code, with what rkv says of it."""
    cluster = theirs.ScoreBasedKV(size, window, enable_score_cache=True, alpha=0.8)
    scores = None

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        nonlocal scores
        if keys.shape[2] < size + buffer:
            return keys, values
        queries = x.queries[:, :, newest + 1 - window : newest + 1]
        keys, values, _, scores = cluster.update_kv(keys, queries, values, score_cache=scores)
        return keys, values

    return compress


def lazy(
    theirs: SimpleNamespace, x: Inputs, prompt: int, size: int, window: int, alpha: float
) -> Compress:
    theirs.TempCache.alpha = alpha
    theirs.TempCache.reset()
    cluster = theirs.Window_LAZYKVCluster(1, window, size, window)

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        if newest < prompt:
            return keys, values
        query, step = x.queries[:, :, newest : newest + 1], newest - prompt + 1
        return cluster.update_kv_in_decoding(keys, query, values, None, 1, window, 0, step)[:2]

    return compress


def trimkv(theirs: SimpleNamespace, x: Inputs, size: int, buffer: int) -> Compress:
    """Log retention of a token: log sigmoid(2 + its key's first number)."""
    cache = theirs.TrimKVCache(device="cpu")

    def compress(keys: Tensor, values: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        cache.key_cache, cache.value_cache = [keys], [values]
        cache.retention_weights = [F.logsigmoid(2 + keys[..., 0])]
        cache.kv_positions, cache.n_seen_tokens = [values[..., 0]], [newest + 1]
        cache.compress(memory_size=size, buffer_size=buffer)
        return cache.key_cache[0], cache.value_cache[0]

    return compress


@dataclasses.dataclass(frozen=True)
class Run:
    """One figure: a driver of a policy, with what its classes get, on the inputs as they say."""

    driver: Callable[..., Compress]
    options: dict[str, Any]
    prompts: tuple[int, ...] = (24,)
    group: int = 1
    repeat: bool = False

    def times(self, theirs: SimpleNamespace) -> np.ndarray:
        """[sequences, prompts, H, T] uint8."""
        told = {"prompt"} & set(self.driver.__annotations__)

        def one(x: Inputs, prompt: int) -> np.ndarray:
            options = {**self.options, **dict.fromkeys(told, prompt)}
            return x.decode(prompt, self.driver(theirs, x, **options))

        inputs = [Inputs(i, self.group, self.repeat) for i in range(SEQUENCES)]
        return np.array([[one(x, prompt) for prompt in self.prompts] for x in inputs])


@dataclasses.dataclass(frozen=True)
class Author:
    """Where a policy's code lies (a repository at GitHub), and what is run of it."""

    repository: str
    files: list[str]
    names: list[str]
    runs: dict[str, Run]


SNAPKV = {"size": 48, "window": 16}
RPC = {"P": 16, "R": 8, "c": 4}
LAZY = {"size": 40, "window": 8, "alpha": 0.02}
LENGTHS = (80, 96, 112, 127)

AUTHORS = {
    "streaming": Author(
        "mit-han-lab/streaming-llm",
        ["streaming_llm/kv_cache.py"],
        ["slice1d", "slice2d", "slice3d", "DIM_TO_SLICE", "StartRecentKVCache"],
        {"times": Run(streaming, {"start": 4, "recent": 28})},
    ),
    "tova": Author(
        "schwartz-lab-NLP/TOVA",
        ["src/tova_cache.py"],
        ["TOVACache"],
        {"times": Run(tova, {"size": 32}, group=2)},
    ),
    "h2o": Author(
        "FMInference/H2O",
        ["h2o_hf/utils_real_drop/modify_llama.py"],
        ["H2OKVCache_LayerWise"],
        {
            "times": Run(h2o, {"heavy": 16, "recent": 16}),
            "query_heads": Run(h2o, {"heavy": 16, "recent": 16}, group=2, repeat=True),
        },
    ),
    "keydiff": Author(
        "NVIDIA/kvpress",
        ["kvpress/presses/scorer_press.py", "kvpress/presses/keydiff_press.py"],
        ["ScorerPress", "KeyDiffPress"],
        {"times": Run(keydiff, {"size": 40, "drop": 5})},
    ),
    "expected": Author(
        "NVIDIA/kvpress",
        ["kvpress/presses/scorer_press.py", "kvpress/presses/expected_attention_press.py"],
        ["ScorerPress", "ExpectedAttentionPress"],
        {"times": Run(expected, {"size": 40, "drop": 5, "ahead": 16}, (24, 40), group=2)},
    ),
    "criticalkv": Author(
        "NVIDIA/kvpress",
        [
            "kvpress/presses/scorer_press.py",
            "kvpress/presses/snapkv_press.py",
            "kvpress/presses/criticalkv_press.py",
        ],
        ["ScorerPress", "SnapKVPress", "CriticalKVPress"],
        {"times": Run(criticalkv, SNAPKV, LENGTHS, group=2)},
    ),
    "triattention": Author(
        "WeianMao/triattention",
        ["triattention/methods/pruning_utils.py", "triattention/methods/triattention.py"],
        [
            "rotate_half",
            "invert_rope",
            "to_complex_pairs",
            "HeadFrequencyStats",
            "build_geometric_offsets",
            "compute_frequency_statistics_from_means",
            "score_keys_for_round",
            "TriAttention",
        ],
        {"times": Run(triattention, {"size": 40, "buffer": 8}, (16, 24), group=2)},
    ),
    "longflow": Author(
        "yisunlp/LongFLow",
        ["triton_kernel/attention.py"],
        [],
        {"times": Run(longflow, {"size": 32}, group=2)},
    ),
    "snapkv": Author(
        "FasterDecoding/SnapKV",
        ["snapkv/monkeypatch/snapkv_utils.py"],
        ["SnapKVCluster"],
        {
            "times": Run(snapkv, SNAPKV, LENGTHS),
            "query_heads": Run(snapkv, SNAPKV, LENGTHS, group=2, repeat=True),
        },
    ),
    "rpc": Author(
        "jiwonsong-dev/ReasoningPathCompression",
        ["rpc/rpc_utils.py"],
        ["repeat_kv", "RPCCluster"],
        {
            "times": Run(rpc, RPC | {"as_run": False}, (1, 24, 40), group=2),
            "as_run": Run(rpc, RPC | {"as_run": True}, (1, 24, 40), group=2),
        },
    ),
    "rkv": Author(
        "Zefan-Cai/R-KV",
        ["rkv/utils.py", "rkv/compression/r1_kv.py"],
        ["compute_attention_scores", "cal_similarity", "R1KV"],
        {"times": Run(rkv, {"size": 40, "buffer": 16, "window": 8}, group=2)},
    ),
    "gkv": Author(
        "microsoft/G-KV",
        ["gkv/utils/compression_score.py", "gkv/model/compression/score_based.py"],
        ["compute_attention_scores", "ScoreBasedKV"],
        {"times": Run(gkv, {"size": 32, "buffer": 8, "window": 8}, (24, 36), group=2)},
    ),
    # At commit e7a0eb18, which still has it.
    "lazy": Author(
        "WeianMao/triattention",
        ["LazyEviction/model/temp_cacheobs.py", "LazyEviction/model/kv_utils.py"],
        ["TempCache", "Window_LAZYKVCluster"],
        {
            "times": Run(lazy, LAZY, (24, 40)),
            "query_heads": Run(lazy, LAZY, (24, 40), group=2, repeat=True),
        },
    ),
    "trimkv": Author(
        "ngocbh/trimkv",
        ["src/trimkv/cache_utils.py"],
        ["TrimKVCache"],
        {"times": Run(trimkv, {"size": 35, "buffer": 5})},
    ),
}


def draw() -> None:
    """New keys and queries; whole sixteenths, queries twice as large."""
    rng = np.random.default_rng(SEED)
    shape = (SEQUENCES, HEADS, TOKENS, DIM)
    arrays = {
        name: np.clip(np.rint(size * SCALE * rng.standard_normal(shape)), -127, 127).astype(np.int8)
        for name, size in (("keys", 1.0), ("queries", 2.0))
    }
    save("inputs", arrays)


def save(name: str, arrays: dict[str, Any]) -> None:
    """Writes tests/reference/golden/NAME.npz."""
    np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="+", help=f"inputs, or one of {', '.join(AUTHORS)} =PATH")
    for what in parser.parse_args().what:
        name, _, path = what.partition("=")
        if name == "inputs":
            draw()
            continue
        author, root = AUTHORS[name], Path(path)
        kernel = name == "longflow"
        theirs = longflow_kernel(root) if kernel else defined(root, author.files, author.names)
        command = ["git", "-C", path, "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        origin = {"repository": author.repository, "commit": commit, "files": author.files}
        with contextlib.redirect_stdout(io.StringIO()):  # some print when made
            figures = {key: run.times(theirs) for key, run in author.runs.items()}
        options = {
            key: {**run.options, "prompts": run.prompts, "group": run.group}
            for key, run in author.runs.items()
        }
        about = json.dumps({**origin, "runs": options})
        save(name, {"about": np.array(about), **figures})
        print(name, {key: figure.shape for key, figure in figures.items()})


if __name__ == "__main__":
    main()
