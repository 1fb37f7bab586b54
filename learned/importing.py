"""Published weights as scorers of this package: TRIM-KV, DMS, KVzap, Fast KVzip.

Each kind has a table from our parameters to their tensors; what differs beside names is folded in
here. Nothing of theirs is run: files are read as tensors alone.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicies.errors import UserError, nearest
from kvpolicies.files import naming, read_text
from kvpolicies.learned.base import config_for
from kvpolicies.learned.scorer import Scorer, without_storage

ATTENTION = "model.layers.{y}.self_attn."
NAMES: dict[str, dict[str, str]] = {
    # ngocbh/trimkv: trimkv_weights.pth
    "trimkv": {
        "first.weight": ATTENTION + "retention_gate.linear1.weight",
        "first.bias": ATTENTION + "retention_gate.linear1.bias",
        "second.weight": ATTENTION + "retention_gate.linear2.weight",
        "second.bias": ATTENTION + "retention_gate.bias",
    },
    # NVIDIA's DMS models with a decision layer of their own (dms_separate_alpha)
    "dms": {
        "proj.weight": ATTENTION + "dms_proj_alpha.weight",
        "proj.bias": ATTENTION + "dms_proj_alpha.bias",
    },
    # nvidia/KVzap-linear-*
    "kvzap": {"last.weight": "layers.{y}.weight", "last.bias": "layers.{y}.bias"},
    # Jang-Hyun/Fast-KVzip: MODEL/q4_dim16_sink16.pt, a list of layers under "module"
    "fastkvzip": {
        "q_proj.weight": "{y}.q_proj.weight",
        "q_proj.bias": "{y}.q_proj.bias",
        "k_proj.weight": "{y}.k_proj.weight",
        "q_norm": "{y}.q_norm.weight",
        "k_norm": "{y}.k_norm.weight",
        "k_base": "{y}.k_base",
        "b": "{y}.b",
    },
}
_MLP = {  # nvidia/KVzap-mlp-*
    "first.weight": "layers.{y}.0.weight",
    "first.bias": "layers.{y}.0.bias",
    "last.weight": "layers.{y}.2.weight",
    "last.bias": "layers.{y}.2.bias",
}
_NORM = ATTENTION + "dms_proj_alpha_norm.weight"


def read_published(kind: str, folder: Path, model: Any) -> Scorer:
    """A scorer of our own format with published weights, float32 on the CPU, bound to `model`.

    Args:
        kind: trimkv, dms, kvzap or fastkvzip.
        folder: with their files, or one of them.
        model: the base model; of dms the model that its own training changed.

    Raises:
        UserError: for a kind that has no known layout, files that are not there or cannot be read,
            a tensor that is missing or of another size than the model's.
    """
    if kind not in NAMES:
        known = nearest(kind, list(NAMES))
        more = " (no layout of its authors is public)" if kind.startswith("kvpop") else ""
        raise UserError(f"import: no published weights of {kind!r} can be read{more}; {known}")
    found = _tensors(folder)
    names = NAMES[kind]
    if kind == "kvzap" and "layers.0.0.weight" in found:
        names = _MLP
    hidden = {"trimkv": "first.weight", "kvzap": "first.weight", "fastkvzip": "q_norm"}.get(kind)
    size = 0
    if hidden in names:
        size = len(_taken(found, names[hidden].format(y=_first(found, names[hidden])), folder))
    config = config_for(model, kind, hidden=size)
    scorer = without_storage(config)
    expected, made = scorer.state_dict(), {}
    for y in config.layers:
        part = {our: found.get(their.format(y=y)) for our, their in names.items()}
        if kind == "dms":
            part = _decisions(part, found, y, folder, model)
        for our, tensor in part.items():
            name = f"nets.{y}.{our}"
            if tensor is None:
                raise UserError(f"import {folder}: lacks tensor {names[our].format(y=y)}")
            if tensor.shape != expected[name].shape:
                raise UserError(
                    f"import {folder}: tensor {names[our].format(y=y)} is {list(tensor.shape)}, "
                    f"the model wants {list(expected[name].shape)}"
                )
            made[name] = tensor.float()
    scorer.load_state_dict(made, assign=True)
    return scorer


def _decisions(
    part: dict[str, Tensor | None], found: Mapping[str, Tensor], y: int, folder: Path, model: Any
) -> dict[str, Tensor | None]:
    """Ours reads the attention's input, theirs the layer's under a norm of its own: the two differ
    by a factor a number, which goes into the weights; scale and offset into ours, 100 and 5."""
    config = _config(folder)
    scale, offset = (
        float(config.get(key, value))
        for key, value in (("dms_alpha_scale", 100.0), ("dms_initial_alpha_offset", 5.0))
    )
    weight, bias, norm = part["proj.weight"], part["proj.bias"], found.get(_NORM.format(y=y))
    if weight is None or norm is None:
        missing = _NORM if weight is not None else NAMES["dms"]["proj.weight"]
        raise UserError(
            f"import {folder}: lacks tensor {missing.format(y=y)}; a model whose decisions come "
            "out of a query's channel (dms_separate_alpha: false) has no layer to import"
        )
    own = _input_norm(model, y)
    if norm.shape != own.shape or weight.shape[-1:] != own.shape:
        raise UserError(
            f"import {folder}: tensor {_NORM.format(y=y)} is {list(norm.shape)}, the model wants "
            f"{list(own.shape)}"
        )
    if not bool((own != 0).all()):
        raise UserError(f"import {folder}: the model's input norm of layer {y} has zeros")
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return {
        "proj.weight": weight.float() * (norm.float() / own) * (scale / 100),
        "proj.bias": (scale * bias.float() - offset + 5) / 100,
    }


def _input_norm(model: Any, y: int) -> Tensor:
    """The weight of the norm before a layer's attention."""
    pattern = re.compile(rf"(^|\.)layers\.{y}\.input_layernorm\.weight$")
    for name, weight in model.named_parameters():
        if pattern.search(name):
            return weight.detach().float().cpu()
    raise UserError(f"import dms: model {type(model).__name__} has no input_layernorm in layer {y}")


def _config(folder: Path) -> Mapping[str, Any]:
    file = (folder if folder.is_dir() else folder.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_text(file, "import"))
    except ValueError:
        raise UserError(f"import {file}: not JSON") from None
    return found if isinstance(found, dict) else {}


def _taken(found: Mapping[str, Tensor], name: str, folder: Path) -> Tensor:
    if name not in found:
        raise UserError(f"import {folder}: lacks tensor {name}")
    return found[name]


def _first(found: Mapping[str, Tensor], name: str) -> int:
    """The first layer that has a tensor of this name; a sliding one has none."""
    return next((y for y in range(1 << 10) if name.format(y=y) in found), 0)


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of a folder's files, by name; those of whole models only where a
    kind's names are.

    Raises:
        UserError: if there is no such file, or one that cannot be read.
    """
    if not folder.exists():
        raise UserError(f"import {folder}: no such file or folder")
    files = [folder] if folder.is_file() else sorted(_files(folder))
    if not files:
        raise UserError(f"import {folder}: holds no .safetensors, .pth, .pt or .bin file")
    found: dict[str, Tensor] = {}
    for file in files:
        read = _safetensors if file.suffix == ".safetensors" else _pickled
        found.update(read(file))
    return found


def _files(folder: Path) -> Iterator[Path]:
    for suffix in (".safetensors", ".pth", ".pt", ".bin"):
        yield from folder.glob(f"*{suffix}")


def _wanted() -> Callable[[str], bool]:
    parts = ("retention_gate", "dms_proj_alpha")
    return lambda name: any(part in name for part in parts) or not name.startswith("model.")


def _safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    wanted = _wanted()
    with naming(file, "import", "cannot be read: "), safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118


def _pickled(file: Path) -> dict[str, Tensor]:
    with naming(file, "import", "cannot be read: "):
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # of pickle, zip and torch, many kinds
            raise UserError(f"import {file}: no file of tensors ({type(error).__name__})") from None
    return dict(_flat(loaded.get("module", loaded) if isinstance(loaded, dict) else loaded))


def _flat(loaded: Any, before: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of nested mappings and lists, names joined by dots."""
    if isinstance(loaded, Tensor):
        yield before, loaded
    elif isinstance(loaded, Mapping | list | tuple):
        pairs = loaded.items() if isinstance(loaded, Mapping) else enumerate(loaded)
        for key, value in pairs:
            yield from _flat(value, f"{before}.{key}" if before else str(key))
