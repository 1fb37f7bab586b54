"""Statistics of a model's queries, which `kvpolicies calibrate` takes and triattention reads.

A safetensors file: of each layer that evicts, `LAYER.mean` [H, G, D], the mean query before RoPE,
and `LAYER.size` [H, G, P], the mean length of each of its rotated pairs (`Rope.sizes`); in its
metadata which model they are of, and of how many tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.files import make_folder, naming, writing
from kvpolicies.learned import saving

KEY, FILE = "kvpolicies", "statistics.safetensors"


@dataclass(frozen=True)
class QueryStatistics:
    """What queries of one model look like, by layer and query head."""

    base: Mapping[str, Any]
    """The model (`base.fingerprint`)."""
    layers: tuple[int, ...]
    """Layers of the model that are evicted, by index."""
    tokens: int
    """Of the text that they were taken of."""
    mean: Mapping[int, Tensor]
    """By layer [H, G, D] float32: the mean query before RoPE."""
    size: Mapping[int, Tensor]
    """By layer [H, G, P] float32: the mean of `Rope.sizes` of queries before RoPE."""

    def save(self, file: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            UserError: if it cannot be written.
        """
        from safetensors.torch import save_file

        parts = (("mean", self.mean), ("size", self.size))
        tensors = {f"{y}.{name}": part[y].contiguous() for name, part in parts for y in self.layers}
        about = {"base": dict(self.base), "layers": list(self.layers), "tokens": self.tokens}
        make_folder(file.parent, "statistics")
        with writing(file) as half:
            save_file(tensors, half, metadata={KEY: json.dumps(about)})


def find_statistics(name: str) -> Path:
    """The file that `name` is, that lies in the folder, or that the hub has under an id.

    Raises:
        UserError: if it is neither there nor to be had.
    """
    path = Path(name).expanduser()
    return path if path.is_file() else saving.find(name, "statistics", [FILE]) / FILE


def read_statistics(file: Path, device: torch.device) -> QueryStatistics:
    """What `QueryStatistics.save` wrote; read once for each device, and anew when it changes.

    Raises:
        UserError: if the file is missing or damaged, or holds anything else.
    """
    stamp = file.stat().st_mtime_ns if file.is_file() else 0
    return _read(file, stamp, device)


@lru_cache(maxsize=8)
def _read(file: Path, stamp: int, device: torch.device) -> QueryStatistics:
    from safetensors import safe_open

    with (
        naming(file, "statistics", "cannot be read: "),
        safe_open(file, "pt", device=str(device)) as opened,
    ):
        about = (opened.metadata() or {}).get(KEY, "")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    try:
        found = json.loads(about)
        base, layers = found["base"], tuple(int(layer) for layer in found["layers"])
        mean, size = ({y: tensors[f"{y}.{part}"] for y in layers} for part in ("mean", "size"))
        whole = all(
            m.dim() == s.dim() == 3 and m.shape[:2] == s.shape[:2] and layers
            for m, s in zip(mean.values(), size.values(), strict=True)
        )
        tokens = int(found["tokens"])
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"statistics {file}: not a file that kvpolicies calibrate wrote")
    if not all(bool(t.isfinite().all()) for t in tensors.values()):
        raise UserError(f"statistics {file}: holds numbers that are not finite; calibrate again")
    return QueryStatistics(base, layers, tokens, mean, size)
