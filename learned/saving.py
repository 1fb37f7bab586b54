"""Scorers on disk: a folder with config.json and scorer.safetensors, or the same on the hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvpolicies.errors import UserError, first_line
from kvpolicies.files import make_folder, naming, read_text, write_text, writing
from kvpolicies.learned.config import ScorerConfig, read_config

CONFIG, WEIGHTS = "config.json", "scorer.safetensors"


def write(folder: Path, config: ScorerConfig, tensors: Mapping[str, Tensor]) -> None:
    """Writes both files.

    Raises:
        UserError: if the folder cannot be written to.
    """
    from safetensors.torch import save_file

    plain = {name: t.detach().cpu().float().contiguous() for name, t in tensors.items()}
    make_folder(folder, "scorer")
    with writing(folder / WEIGHTS) as half:
        save_file(plain, half)
    write_config(folder, config)


def write_config(folder: Path, config: ScorerConfig) -> None:
    """Writes the config alone.

    Raises:
        UserError: if it cannot be written.
    """
    write_text(folder / CONFIG, config.to_json())


def find(name: str, what: str = "scorer", files: Sequence[str] = (CONFIG, WEIGHTS)) -> Path:
    """The local folder of a scorer, downloaded if `name` is a hub id such as "owner/scorer".

    Args:
        what: is looked for, for an error. files: of the hub's folder that are needed.

    Raises:
        UserError: if it is neither there nor to be had.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "~", "/")) or name.count("/") != 1:
        raise UserError(f"{what} {name!r}: no such folder (a hub id reads 'owner/name')")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # whatever the hub's client, network or disk has to say
        raise UserError(
            f"{what} {name!r}: no such folder, and not to be had from the hub: {first_line(error)}"
        ) from error


def config_in(folder: Path) -> ScorerConfig:
    """The folder's config.

    Raises:
        UserError: if it is missing or wrong.
    """
    file = folder / CONFIG
    return read_config(read_text(file, "scorer"), str(file))


def tensors_in(folder: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The folder's weights, float32 on the CPU, by the names and shapes of `expected`.

    Raises:
        UserError: if the file is missing or damaged, or holds other names, shapes, or NaN.
    """
    from safetensors.torch import load_file

    with naming(folder / WEIGHTS, "scorer", "cannot be read: "):
        found = load_file(folder / WEIGHTS)
    for name in sorted(found.keys() ^ expected.keys()):
        what = "lacks" if name in expected else "holds an unknown"
        raise UserError(f"scorer {folder}: {WEIGHTS} {what} tensor {name}")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise UserError(
                f"scorer {folder}: tensor {name} is {list(found[name].shape)}, "
                f"its {CONFIG} says {list(tensor.shape)}"
            )
        if not found[name].isfinite().all():
            raise UserError(f"scorer {folder}: tensor {name} is not finite")
    return {name: tensor.to(torch.float32) for name, tensor in found.items()}
