"""Models, traces, scorers, folders and words that are spoilt: the rest of attacks.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from tests.support.attacks import Ground, Input

TEMPLATES = {
    "no template": "{{", "a loop without end": "{% for x in y %}", "an unknown name": "{{ a.b.c }}",
    "a division by zero": "{{ 1 // 0 }}", "text and a number": "{{ 'a' + 1 }}",
    "a refusal": "{{ raise_exception('no') }}", "an unknown filter": "{{ 1 | nosuch }}",
    "an attribute": "{{ messages[9].content }}", "a forbidden name": "{{ [].__class__.mro() }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nothing": "{{ '' }}",
    "calling text": "{{ messages() }}",
}  # fmt: skip

CONFIGS: dict[str, Any] = {
    "num_attention_heads": (0, -1, 3, "x", None, 10**9), "num_key_value_heads": (0, -1, 3, "x"),
    "hidden_size": (0, -1, 7, "x", None), "num_hidden_layers": (0, -1, "x", None),
    "vocab_size": (0, -1, "x"), "head_dim": (0, -1, "x"), "intermediate_size": (0, "x"),
    "model_type": ("nosuch", "bert", "t5", "mamba", "gpt2", "clip", None, 7, []),
    "architectures": ("x", [], None), "rope_parameters": ("x", [], {"rope_type": "nosuch"}),
    "max_position_embeddings": (0, -1, "x"), "rms_norm_eps": ("x",), "hidden_act": ("nosuch", 3),
    "torch_dtype": ("nosuch",), "dtype": ("nosuch", 3), "layer_types": ("x", ["nosuch"], []),
    "tie_word_embeddings": ("x",), "quantization_config": ("x", {"quant_method": "nosuch"}),
}  # fmt: skip


def models(ground: Ground) -> Iterator[Input]:
    for what, folder in _models(ground):
        model, out = ["--model", str(folder)], ["--out", f"{folder}.out"]
        plain = ["--prompt", "ann", "--max-new-tokens", "2"]
        yield f"generate, {what}", ["generate", *model, *plain]
        yield f"bench, {what}", ["bench", *model, *out, "--new", "3", "--prompt", "2",
                                 "--policies", "streaming", "--budgets", "40", "--no-split",
                                 "--batch-sizes", "1", "--repeats", "1"]  # fmt: skip
        yield f"replay, {what}", ["replay", str(ground.trace), *model]
        yield f"serve, {what}", ["serve", *model, "--port", "0"]
        task = ["--task", "math500", "--data", str(ground.data), "--max-new-tokens", "3"]
        few = ["--policies", "streaming", "--budgets", "40", "--problems", "1"]
        yield f"compare, {what}", ["compare", *model, *task, *few, *out]
        yield f"revisit, {what}", ["revisit", *model, *few, "--traces", str(ground.data), *out]
        yield f"train, {what}", ["train", str(ground.root / "recipe.yaml"), *model, *out]
        if what.startswith("config"):
            config = str(folder / "config.json")
            yield f"bench config, {what}", ["bench", "--random", config, "--predict-only"]


def _models(ground: Ground) -> Iterator[tuple[str, Path]]:
    known = json.loads((ground.model / "config.json").read_text())
    for key, wrong in CONFIGS.items():
        for value in wrong:
            folder = ground.fresh(ground.model)
            (folder / "config.json").write_text(json.dumps({**known, key: value}))
            yield f"config {key} {value!r}"[:60], folder
    for what, text in TEMPLATES.items():
        folder = ground.fresh(ground.model)
        (folder / "chat_template.jinja").write_text(text)
        yield f"template {what}", folder
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
                 "generation_config.json"):  # fmt: skip
        for what, content in (("empty", b""), ("broken", b"{"), ("binary", bytes(range(256)) * 99),
                              ("a list", b"[]"), ("deep", b"[" * 100_000)):  # fmt: skip
            folder = ground.fresh(ground.model)
            (folder / name).write_bytes(content)
            yield f"{name} {what}", folder
        folder = ground.fresh(ground.model)
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
        yield f"{name} a folder", folder


def traces(ground: Ground) -> Iterator[Input]:
    good = load_file(ground.trace)
    for what, path in _files(ground, ground.trace):
        yield what, ["replay", str(path)]
    for name, tensor in good.items():
        for what, wrong in (
            ("float", tensor.float()), ("negative", -1 - tensor), ("huge", tensor + 10**6),
            ("flat", tensor.flatten()), ("of no size", tensor[..., :0]),
            ("two", torch.cat([tensor] * 2)), ("one token", tensor[..., :1]), ("bool", tensor > 3),
        ):  # fmt: skip
            path = ground.fresh() / "trace.safetensors"
            save_file({**good, name: wrong.contiguous()}, path)
            yield f"{name} {what}", ["replay", str(path)]


def scorers(ground: Ground) -> Iterator[Input]:
    from tests.support.attacks import WRONG, _spoilt

    known = json.loads((ground.scorer / "config.json").read_text())
    contents = {f"{key} {what}": json.dumps(x).encode() for key, what, x in _spoilt(known, 2)}
    assert WRONG
    for what, content in contents.items():
        folder = ground.fresh(ground.scorer)
        (folder / "config.json").write_bytes(content)
        yield what, _scored(folder)
    for name in ("config.json", "scorer.safetensors"):
        for what, path in _files(ground, ground.scorer / name, ground.scorer):
            yield f"{name} {what}", _scored(path.parent)
    good = load_file(ground.scorer / "scorer.safetensors")
    first = next(iter(good))
    for what, wrong in (("half", good[first].half()), ("nan", good[first] * float("nan")),
                        ("flat", good[first].flatten())):  # fmt: skip
        folder = ground.fresh(ground.scorer)
        save_file({**good, first: wrong}, folder / "scorer.safetensors")
        yield f"{first} {what}", _scored(folder)


def _scored(folder: Path) -> list[str]:
    policy = f"kvpop_mlp(scorer={str(folder)!r})"
    return ["generate", "--policy", policy, "--budget", "69", "--raw", "--prompt", "ann bob",
            "--max-new-tokens", "2"]  # fmt: skip


def _files(ground: Ground, file: Path, of: Path | None = None) -> Iterator[tuple[str, Path]]:
    """A file that is not what it should be, in a copy of the folder `of`."""
    content = file.read_bytes()
    for what, spoilt in (("empty", b""), ("half", content[: len(content) // 2]), ("text", b"x"),
                         ("binary", bytes(range(256)) * 99), ("long", content + b"x")):  # fmt: skip
        path = ground.fresh(of) / file.name if of else ground.fresh() / file.name
        path.write_bytes(spoilt)
        yield what, path
    path = ground.fresh(of) / file.name if of else ground.fresh() / file.name
    path.unlink(missing_ok=True)
    yield "missing", path
    path = ground.fresh(of) / file.name if of else ground.fresh() / file.name
    path.unlink(missing_ok=True)
    path.mkdir()
    yield "a folder", path


def places(ground: Ground) -> Iterator[Input]:
    """Where results would go: a file, a device, no place at all, a folder with a file's name."""
    from tests.support.attacks import BENCH, REVISIT, SELECT, STUDY

    file = ground.fresh() / "file"
    file.touch()
    taken = {}
    for kind, names in (
        ("compare", ("report.html", "results.jsonl", "run.json", "summary.csv", "claims.lock")),
        ("bench", ("bench.jsonl", "bench.csv", "throughput.png", "run.json")),
        ("revisit", ("revisit.html", "revisit.json", "heads.csv", "results.jsonl", "run.json")),
        ("train", ("run.json", "figures.csv", "claims.lock")),
        ("generate", ("0.safetensors",)),
    ):
        for name in names:
            folder = ground.fresh()
            (folder / name).mkdir()
            taken[f"{kind}, {name} a folder"] = (kind, folder)
    everywhere = {
        "a file": file, "below a file": file / "x", "a device": Path("/dev/null"),
        "below a device": Path("/dev/null/x"), "no file system for it": Path("/proc/x"),
        "a long name": ground.root / ("x" * 300),
        "a long path": ground.root / "/".join(["y" * 99] * 99),
    }  # fmt: skip
    commands = {
        "compare": (["compare", *STUDY], "--out"), "bench": (["bench", *BENCH], "--out"),
        "revisit": (["revisit", *REVISIT], "--out"),
        "train": (["train", str(ground.root / "recipe.yaml")], "--out"),
        "select": (["select", str(ground.study), *SELECT], "--out"),
        "select json": (["select", str(ground.study), *SELECT, "--out", f"{file}.yaml"], "--json"),
        "generate": (["generate", "--raw", "--prompt", "ann", "--max-new-tokens", "2"], "--trace"),
        "ablate": (["ablate", "loss", "--steps", "1"], "--out"),
    }  # fmt: skip
    for command, (argv, flag) in commands.items():
        for what, path in everywhere.items():
            yield f"{command}, {what}", [*argv, flag, str(path)]
        if command.startswith("select"):
            yield f"{command}, --force on a device", [*argv, flag, "/dev/null", "--force"]
    for what, (command, folder) in taken.items():
        argv, flag = commands[command]
        yield what, [*argv, flag, str(folder)]


def words(ground: Ground) -> Iterator[Input]:
    """Arguments: of no encoding, long, empty, of other scripts, with codes of a terminal."""
    odd = {"bytes": "caf\udce9", "long": "x" * 5000, "empty": "", "blank": " ",
           "a line break": "a\nb", "codes": "\x1b[31m\x07", "arabic": "٣", "brackets": "(" * 3000,
           "percent": "%s%(x)s{0}",
           "long with blanks": "x y " * 2000, "options": "beacon(" + "n" * 4000 + "=1)",
           "a long number": "9" * 5000, "nan": "nan", "infinity": "inf", "exponent": "1e999",
           "minus": "-5", "a folder": "/",
           "a device": "/dev/full", "underscores": "4_0"}  # fmt: skip
    flags = {
        "compare": ("--policies", "--budgets", "--task", "--data", "--problems", "--samples",
                    "--length", "--temperature", "--seed", "--dtype", "--device", "--template",
                    "--wrapper", "--sinks", "--out", "--texts", "--tensor-parallel"),
        "generate": ("--policy", "--budget", "--prompt", "--prompt-file", "--window", "--top-p",
                     "--top-k", "--trace", "--step", "--kernels", "--max-length"),
        "serve": ("--host", "--port", "--queue", "--grace", "--max-body", "--name", "--policy"),
        "bench": ("--policies", "--budgets", "--batch-sizes", "--prompt", "--new", "--memory",
                  "--random", "--tail", "--requests", "--step", "--dtype"),
        "revisit": ("--traces", "--policies", "--k", "--distance", "--head", "--definition"),
        "select": ("--memory", "--batch", "--max-tokens", "--largest-loss", "--tolerance",
                   "--model"),
        "train": ("--kind", "--data", "--budget", "--lr", "--betas", "--steps", "--schedule"),
        "ablate": ("--steps", "--seed", "--problems", "--device"),
        "replay": ("--model",),
    }  # fmt: skip
    first = {"select": str(ground.study), "train": "ledger-kvpop", "ablate": "nosuch",
             "replay": str(ground.trace)}  # fmt: skip
    for command, options in flags.items():
        for what, word in odd.items():
            yield f"{command} {what}", [command, word]
            for flag in options:
                argv = [command, *([first[command]] if command in first else []), f"{flag}={word}"]
                if command not in ("ablate", "replay", "select") and flag not in ("--random",):
                    argv.append("--data=./nowhere" if command == "train" else "--model=./nowhere")
                yield f"{command} {flag} {what}", argv
