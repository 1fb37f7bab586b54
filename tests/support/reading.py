"""What would wait for a GPU, seen without one: operators that hand a tensor's value to the host."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "unique_dim")


class Reading(TorchDispatchMode):
    """Notes operators that hand values to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        boolean = name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1] or ()
        )
        if name in READS or boolean:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
