"""Where this process stands among those that were started together, by torchrun or by anything.

Only the environment is read: RANK, WORLD_SIZE and LOCAL_RANK (torchrun, Lightning Fabric), or
SLURM's own. Who computes what is settled by claims.py, so that none of these is needed for right
results: rank 0 shows the progress bar and writes the report, and a rank picks its GPU.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from kvpolicies.errors import UserError

Value = TypeVar("Value")


@dataclass(frozen=True)
class ProcessRank:
    """This process among `world` processes; a process alone is rank 0 of 1."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Its number on this machine."""

    @property
    def leads(self) -> bool:
        """Whether it speaks for all: bars, the table, the report."""
        return self.rank == 0


def here() -> ProcessRank:
    """This process's place.

    Raises:
        UserError: variables that are no numbers, or do not fit together.
    """
    rank = _number(0, "RANK", "SLURM_PROCID")
    world = _number(1, "WORLD_SIZE", "SLURM_NTASKS")
    local = _number(0, "LOCAL_RANK", "SLURM_LOCALID")
    if "RANK" in os.environ and rank >= world:
        raise UserError(f"RANK is {rank} and WORLD_SIZE {world}: ranks count from 0 to it")
    return ProcessRank(rank, world, local)


class Group:
    """The processes that one model is spread over: all run the same units, one of them writes.

    Args:
        size: processes; 1 needs no process group and agrees with itself.

    Raises:
        UserError: another number of processes was started.
    """

    def __init__(self, size: int, place: ProcessRank) -> None:
        if size > 1 and size != place.world:
            raise UserError(
                f"tensor_parallel: {size} processes must be started together (torchrun "
                f"--nproc-per-node {size}), not {place.world}; more groups share the work when "
                "each is started on the same --out by its own torchrun"
            )
        self.size, self.leads = size, size == 1 or place.rank == 0

    def agree(self, value: Value) -> Value:
        """The leading process's `value`, in each of them."""
        if self.size == 1:
            return value
        from torch import distributed

        box = [value if self.leads else None]
        distributed.broadcast_object_list(box, src=0)
        return cast(Value, box[0])

    def follow(self, turns: Iterator[int]) -> Iterator[int]:
        """The leading process's `turns`, in each of them; only the leader's are asked for."""
        while (turn := self.agree(next(turns, None) if self.leads else None)) is not None:
            yield turn

    def close(self) -> None:
        """Leaves the process group, which would complain at the end."""
        if self.size > 1:
            from torch import distributed

            distributed.destroy_process_group()


def device(name: str, place: ProcessRank) -> str:
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
