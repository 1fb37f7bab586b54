"""Which kernels run: plain torch, or Triton.

`auto`, the default, is Triton for tensors on a GPU where Triton is installed, else torch. The
choice is the process's, not a tensor's: set it around a run, and record what `described` says.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvpolicies.kernels.jit import INTERPRETED, triton, triton_version

CHOICES = ("auto", "torch", "triton")
# What the kernels are written for; anything else is torch's, whatever was chosen.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256

_choice = "auto"


def chosen() -> str:
    """What was asked for: `auto`, `torch` or `triton`."""
    return _choice


@contextmanager
def backend(choice: str) -> Iterator[None]:
    """Runs the kernels by `choice` inside, and as before outside.

    Raises:
        ValueError: for another word, or `triton` where it is not installed.
    """
    global _choice
    if choice not in CHOICES:
        raise ValueError(f"kernels must be one of {', '.join(CHOICES)}, got {choice!r}")
    if choice == "triton" and triton is None:
        raise ValueError("kernels: triton asked for, but not installed (pip install triton)")
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def use_triton(tensor: Tensor) -> bool:
    """Whether kernels on this tensor's device are Triton's.

    Raises:
        ValueError: when `triton` was asked for and the tensor is where it cannot run.
    """
    if _choice == "torch" or triton is None:
        return False
    if tensor.is_cuda:
        return True
    if _choice == "auto":
        return False
    if INTERPRETED and tensor.device.type == "cpu":
        return True
    raise ValueError(
        f"kernels: triton asked for, but the tensors are on {tensor.device}; Triton needs a GPU "
        "(or TRITON_INTERPRET=1, slow, for tests): use auto or torch"
    )


def suits(*tensors: Tensor) -> bool:
    """`use_triton`, and head sizes and dtypes [..., D] are ones the kernels are written for.

    They have no backward: where a gradient is wanted, torch it is.
    """
    if not use_triton(tensors[0]):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return all(t.dtype in DTYPES and 0 < t.shape[-1] <= LARGEST_HEAD for t in tensors)


def described(device: torch.device) -> str:
    """What runs on a device by the choice in force, for a run's record: `torch`, `triton 3.9.0`."""
    on_triton = use_triton(torch.empty(0, device=device))
    interpreted = " (interpreted)" if INTERPRETED else ""
    return f"triton {triton_version()}{interpreted}" if on_triton else "torch"
