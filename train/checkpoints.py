"""Checkpoints of a run: which one it goes on from, when the newest is not whole.

Two are kept. One that cannot be read, or that holds weights with which the loss was NaN, is set
aside under another name, and the run goes on from the one before.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from kvpolicies.errors import UserError, caution

FOLDER, SUFFIX = "checkpoints", ".ckpt"
KEPT = 2
PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step")
"""What a checkpoint of Lightning's must have to be gone on from."""


def saving(out: Path, every: int) -> ModelCheckpoint:
    """Lightning's callback that writes one every so many steps."""
    return ModelCheckpoint(
        out / FOLDER,
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=KEPT,
        every_n_train_steps=every,
        save_on_train_epoch_end=False,
    )


def newest(out: Path) -> Path | None:
    """The checkpoint of the most steps that is whole; None where there is none at all.

    Raises:
        UserError: if there are some, and none is whole.
    """
    found = sorted((out / FOLDER).glob(f"step=*{SUFFIX}"), key=_steps, reverse=True)
    for path in found:
        if whole(path):
            if path != found[0]:
                caution(f"{found[0]}: cannot be read; going on from {path.name}, the one before")
            return path
    if found:
        raise UserError(
            f"{found[0]}: cannot be read, and no checkpoint before it can: remove the folder to "
            "train anew"
        )
    return None


def before(out: Path, step: int) -> Path | None:
    """The newest of fewer steps; those of more, whose weights are of no use, are set aside."""
    _set_aside(out, step)
    return newest(out)


def set_aside(out: Path, start: Path) -> None:
    """Gives checkpoints of more steps than `start` another name, so that theirs is free."""
    _set_aside(out, _steps(start) + 1)


def _set_aside(out: Path, least: int) -> None:
    for path in (out / FOLDER).glob(f"step=*{SUFFIX}"):
        if _steps(path) >= least:
            path.replace(path.with_suffix(".damaged"))


def whole(path: Path) -> bool:
    """Whether a checkpoint can be gone on from: read, complete, of finite weights."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip() is not None:
                return False
        read: dict[str, Any] = torch.load(path, "cpu", weights_only=True, mmap=True)
        weights = read["state_dict"].values()
        return all(part in read for part in PARTS) and all(
            bool(w.isfinite().all()) for w in weights
        )
    except Exception:  # a damaged file is damaged in any way
        return False


def _steps(path: Path) -> int:
    # "step=40-v1" where a file of the first name was there when it was written.
    digits = path.stem.removeprefix("step=").partition("-")[0]
    return int(digits) if digits.isdigit() else -1
