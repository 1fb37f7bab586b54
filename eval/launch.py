"""Where this process stands among those that were started together, by torchrun or by anything.

Only the environment is read: RANK, WORLD_SIZE and LOCAL_RANK (torchrun, Lightning Fabric), or
SLURM's own. Who computes what is settled by claims.py, so that none of these is needed for right
results: rank 0 shows the progress bar and writes the report, and a rank picks its GPU.
"""

import os
from dataclasses import dataclass

from kvpolicies.errors import UserError


@dataclass(frozen=True)
class Place:
    """This process among `world` processes; a process alone is rank 0 of 1."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Its number on this machine."""

    @property
    def leads(self) -> bool:
        """Whether it speaks for all: bars, the table, the report."""
        return self.rank == 0


def here() -> Place:
    """This process's place.

    Raises:
        UserError: variables that are no numbers, or do not fit together.
    """
    rank = _number(0, "RANK", "SLURM_PROCID")
    world = _number(1, "WORLD_SIZE", "SLURM_NTASKS")
    local = _number(0, "LOCAL_RANK", "SLURM_LOCALID")
    if "RANK" in os.environ and rank >= world:
        raise UserError(f"RANK is {rank} and WORLD_SIZE {world}: ranks count from 0 to it")
    return Place(rank, world, local)


def device(name: str, place: Place) -> str:
    """The device of this rank: `auto` and `cuda` mean its own GPU where there are several."""
    import torch

    count = torch.cuda.device_count()
    if name in ("auto", "cuda") and place.world > 1 and count > 1:
        return f"cuda:{place.local % count}"
    return name


def _number(default: int, *names: str) -> int:
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return default
    text = os.environ[name]
    if not text.isascii() or not text.isdigit():
        raise UserError(f"environment variable {name} must be a whole number, got {text!r}")
    return int(text)
