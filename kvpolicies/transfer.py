"""From the host to the device without waiting: what a decode step knows beforehand."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor


def on_device(numbers: Sequence[int], device: torch.device) -> Int[Tensor, "n"]:
    """Host numbers [n] as an int64 tensor, never to be written to.

    All layers of a step ask for the same ones: they are sent once.
    """
    return _sent(tuple(numbers), device)


def counting(starts: Sequence[int], n: int, device: torch.device) -> Int[Tensor, "b n"]:
    """[b, n] int64, never to be written to: row i counts starts[i], starts[i] + 1, ..."""
    return _counting(tuple(starts), n, device)


@lru_cache(maxsize=64)
def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64)
    # A plain copy to a GPU waits for all that runs there; one from pinned memory does not.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@lru_cache(maxsize=32)
def _counting(starts: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    return on_device(starts, device)[:, None] + torch.arange(n, device=device)
