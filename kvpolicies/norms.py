"""A model's RMS norms by torch's own fused function, where that computes the same.

transformers writes the norm out in seven calls; on a CPU they cost more than the arithmetic, and a
model calls up to four norms a layer. Which classes compute just that is not a list of names, which
would grow old: each module is asked, and keeps its own forward where a single value differs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@contextmanager
def fused_norms(model: Any) -> Iterator[list[nn.Module]]:
    """Inside the block, float32 RMS norms (Zhang and Sennrich, arXiv 1910.07467) take one call.

    Yields:
        the modules that do. Other dtypes keep their own forward, for it rounds in between.
    """
    fused = [(m, f) for m in model.modules() if (f := _fused(m)) and _agree(m, f)]
    for module, forward in fused:
        module.forward = forward
    try:
        yield [module for module, _ in fused]
    finally:
        for module, _ in fused:
            del module.forward


def _fused(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """torch's function with the module's weight and epsilon, if it looks like an RMS norm."""
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    plain = type(weight) is nn.Parameter and weight.dtype == torch.float32 and not weight.is_meta
    if not plain or not isinstance(eps, float) or weight.dim() != 1:
        return None
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or "forward" in vars(module):
        return None  # has one of its own, or somebody has put another in its place

    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != torch.float32:
            return type(module).forward(module, hidden_states)
        return F.rms_norm(hidden_states, weight.shape, weight, eps)

    return forward


@torch.no_grad()
def _agree(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> bool:
    """Whether both give the same values but for rounding, on small, usual and large numbers."""
    weight: Any = module.weight
    size, device = weight.shape[0], weight.device
    signs = torch.arange(size, device=device, dtype=torch.float32).mul(0.7).sin()
    x = signs * torch.tensor([[1e-3], [1.0], [1e3]], device=device)
    try:
        own = type(module).forward(module, x)
    except Exception:  # a class that wants other arguments is no such norm
        return False
    return type(own) is Tensor and torch.allclose(own, forward(x), rtol=1e-5, atol=1e-7)
