"""Bad inputs for all commands, made from good ones: each is spoilt in one place.

A group of GROUPS gives (what is wrong, arguments of a command). A ground is a folder with one
good thing of each kind: a finished study, a model, a trace, a scorer, a bench, a training run.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvpolicies.config import Deployment
from kvpolicies.eval.revisit.config import Revisit
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.tasks.task import Task
from kvpolicies.train.recipe import Recipe
from tests.support.spoilt import models, places, scorers, traces, words

Input = tuple[str, list[str]]

YAMLS: dict[str, bytes] = {
    "a list as key": b"[a, b]: 1\n",
    "a mapping as key": b"{a: 1}: 2\n",
    "a key of text and a list": b"model: x\n? [1]\n: 2\n",
    "a list": b"- model: x\n",
    "text": b"model\n",
    "a number": b"7\n",
    "two documents": b"model: a\n---\nmodel: b\n",
    "deep brackets": b"model: " + b"[" * 5000,
    "closed deep brackets": b"model: " + b"[" * 2000 + b"]" * 2000,
    "deep mappings": b"".join(b" " * i + b"a:\n" for i in range(900)),
    "latin-1": "model: \xe9\n".encode("latin-1"),
    "half of UTF-16": b"\xff\xfem\x00o",
    "UTF-16": "model: [\n".encode("utf-16"),
    "a null byte": b"model: a\0b\n",
    "an escaped null": b'model: "a\\0b"\n',
    "half a surrogate": b'model: "\\ud800"\n',
    "a key twice": b"model: a\nmodel: b\n",
    "tabs": b"model:\n\t- a\n",
    "an alias of nothing": b"model: *a\n",
    "an alias of itself": b"model: &a [*a]\n",
    "a billion laughs": b"a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10)) for c in b"bcdefghi"),
    "an empty int": b"model: !!int ''\n",
    "no bool": b"model: !!bool maybe\n",
    "no float": b"model: !!float .\n",
    "no time": b"model: !!timestamp x\n",
    "no date": b"model: 2026-99-99\n",
    "an object": b"model: !!python/object/apply:os.getcwd []\n",
    "a set": b"model: !!set {a, b}\n",
    "a merge of text": b"<<: x\nmodel: a\n",
    "a long number": b"seed: " + b"9" * 5000 + b"\n",
    "a long key": b"x" * 5000 + b": 1\n",
    "a long text": b"policy: " + b"x y " * 2000 + b"\n",
    "not even text": bytes(range(256)) * 9,
}

VALUES: dict[str, Any] = {
    "a list of lists": [[1]], "a mapping": {"a": "b"}, "true": True, "nan": float("nan"),
    "infinity": float("inf"), "minus": -1, "half": 0.5, "huge": 10**30, "empty": "", "blank": "  ",
    "long": "x" * 5000, "list of null": [None], "a control character": "\x07\n\x1b[31m",
}  # fmt: skip

JSONS: dict[str, bytes] = {
    "an open bracket": b"{", "a list": b"[]", "text": b'"x"', "null": b"null", "nan": b"NaN",
    "deep brackets": b"[" * 100_000, "a long number": b"9" * 5000, "latin-1": b'{"a": "\xe9"}',
    "half a surrogate": b'{"id": "\\ud800", "problem": "p", "answer": "1", "solution": "s"}',
    "two values": b"{} {}", "nothing": b"", "null bytes": b"\0\0\0",
    "a byte order mark": b"\xef\xbb\xbf{",
}  # fmt: skip

WRONG: dict[str, Any] = {
    "null": None, "a list": [], "a mapping": {}, "text": "x", "true": True, "minus one": -1,
    "nan": float("nan"), "huge": 10**400, "half": 0.5, "nested": [[["x"]]],
}  # fmt: skip


_NUMBERS, _TURNS, _WRONG_IN_TURN = itertools.count(), itertools.count(), itertools.cycle(WRONG)


@dataclass(frozen=True)
class Ground:
    """Where good things lie, and a folder for spoilt copies."""

    root: Path
    study: Path
    analysis: Path
    model: Path
    trace: Path
    scorer: Path
    bench: Path
    run: Path
    data: Path

    def fresh(self, of: Path | None = None) -> Path:
        """A new place; a copy of a file or a folder, if one is given."""
        place = self.root / "spoilt" / str(next(_NUMBERS))
        place.mkdir(parents=True)
        if of is None:
            return place
        copied = place / of.name
        (shutil.copytree if of.is_dir() else shutil.copy)(of, copied)
        return copied


def _with_yaml(path: Path) -> dict[str, list[str]]:
    """Commands that read a YAML file, ended where nothing wrong is found in it."""
    file, nowhere = str(path), ["--model", "./nowhere"]
    return {
        "compare": ["compare", file, *nowhere],
        "compare's second": ["compare", "default", file, *nowhere],
        "generate": ["generate", file, "--prompt", "x", *nowhere],
        "serve": ["serve", file, *nowhere],
        "bench": ["bench", file, *nowhere],
        "revisit": ["revisit", file, *nowhere],
        "train": ["train", file, "--data", "./nowhere"],
        "ablate": ["ablate", file],
        "task": ["compare", "--task", file, *nowhere],
    }


def yamls(ground: Ground) -> Iterator[Input]:
    for what, content in YAMLS.items():
        path = ground.fresh() / "file.yaml"
        path.write_bytes(content)
        for command, argv in _with_yaml(path).items():
            yield f"{command} of {what}", argv


def values(ground: Ground) -> Iterator[Input]:
    for command, cls in (("compare", Study), ("generate", Deployment), ("revisit", Revisit),
                         ("train", Recipe), ("task", Task)):  # fmt: skip
        for field in fields(cls):
            for what, value in VALUES.items():
                if field.name in ("model", "data") and value not in ([[1]], {"a": "b"}):
                    continue
                path = ground.fresh() / "file.yaml"
                path.write_text(json.dumps({field.name: value}))
                yield f"{command}, {field.name} {what}", _with_yaml(path)[command]


def data(ground: Ground) -> Iterator[Input]:
    good = json.loads(ground.data.read_text().splitlines()[0])
    contents = dict(JSONS)
    for key in good:
        for what, value in WRONG.items():
            contents[f"{key} {what}"] = json.dumps({**good, key: value}).encode()
        contents[f"no {key}"] = json.dumps({k: v for k, v in good.items() if k != key}).encode()
    model = str(ground.model)
    for what, content in contents.items():
        path = ground.fresh() / "data.jsonl"
        path.write_bytes(content + b"\n")
        file = ["--data", str(path)]
        yield what, ["compare", "--task", "math500", "--model", "./nowhere", *file]
        yield what, ["compare", "--task", "livecodebench", "--model", "./nowhere", *file]
        yield what, ["compare", "--task", "gpqa-diamond", "--model", "./nowhere", *file]
        yield what, ["revisit", "--model", "./nowhere", "--traces", str(path)]
        if what in JSONS:
            yield what, ["generate", "--model", "./nowhere", "--prompt-file", str(path)]
            yield what, ["train", "ledger-kvpop", "--model", model, *file, "--out", f"{path}.out"]


SELECT = ["--largest-loss", "0.9", "--batch", "1", "--max-tokens", "9", "--prompt-tokens", "9"]


def _with_folder(kind: str, ground: Ground, folder: Path) -> Iterator[list[str]]:
    """Commands that read a folder of results of this kind."""
    if kind == "study":
        yield ["select", str(folder), *SELECT, "--out", str(folder / "deploy.yaml")]
        yield ["revisit", "--traces", str(folder), "--policies", "full", "--problems", "1",
               "--out", f"{folder}.revisit"]  # fmt: skip
        yield ["compare", *STUDY, "--out", str(folder)]
    if kind == "bench":
        yield ["bench", *BENCH, "--out", str(folder)]
    if kind == "run":
        yield ["train", str(ground.root / "recipe.yaml"), "--out", str(folder)]
    if kind == "analysis":
        yield ["revisit", *REVISIT, "--out", str(folder)]


STUDY = ["--policies", "streaming,random", "--budgets", "40", "--problems", "4", "--length", "80",
         "--batch-size", "2"]  # fmt: skip
BENCH = ["--policies", "streaming", "--budgets", "40", "--batch-sizes", "1", "--prompt", "4",
         "--new", "3", "--repeats", "1", "--no-split"]  # fmt: skip
REVISIT = ["--policies", "streaming", "--budgets", "30", "--problems", "2", "--length", "60"]
KINDS = {"study": "results.jsonl", "bench": "bench.jsonl", "run": "", "analysis": "results.jsonl"}


def records(ground: Ground) -> Iterator[Input]:
    """run.json: no JSON, and each of its parts of another kind or missing."""
    for kind in KINDS:
        good = getattr(ground, kind)
        known = json.loads((good / "run.json").read_text())
        spoilt: dict[str, bytes] = dict(JSONS)
        for path, what, changed in _spoilt(known, depth=2):
            spoilt[f"{path} {what}"] = json.dumps(changed).encode()
        for what, content in spoilt.items():
            folder = ground.fresh(good)
            (folder / "run.json").write_bytes(content)
            commands = list(_with_folder(kind, ground, folder))
            yield f"{kind}, {what}", commands[next(_TURNS) % len(commands)]


def rows(ground: Ground) -> Iterator[Input]:
    """Rows of results: no JSON, and each field of another kind or missing."""
    for kind, name in KINDS.items():
        if not name:
            continue
        good = getattr(ground, kind)
        first, *others = (good / name).read_text().splitlines()
        spoilt: dict[str, bytes] = {k: v for k, v in JSONS.items() if v}
        for path, what, changed in _spoilt(json.loads(first), depth=1):
            spoilt[f"{path} {what}"] = json.dumps(changed).encode()
        for what, content in spoilt.items():
            folder = ground.fresh(good)
            lines = [content, *(line.encode() for line in others)]
            (folder / name).write_bytes(b"\n".join(lines) + b"\n")
            commands = list(_with_folder(kind, ground, folder))
            yield f"{kind}, {what}", commands[next(_TURNS) % len(commands)]


def _spoilt(record: dict[str, Any], depth: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each key missing, and with three wrong values, which take turns."""
    for key, value in record.items():
        yield key, "missing", {k: v for k, v in record.items() if k != key}
        for what in (next(_WRONG_IN_TURN) for _ in range(3)):
            yield key, what, {**record, key: WRONG[what]}
        if depth > 1 and isinstance(value, dict):
            for inner, what, changed in _spoilt(value, depth - 1):
                yield f"{key}.{inner}", what, {**record, key: copy.deepcopy(changed)}


GROUPS = (yamls, values, data, records, rows, models, traces, scorers, places, words)
