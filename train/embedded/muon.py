"""Muon in float32 and in batches of matrices: what trains the embedded model on a CPU.

``torch.optim.Muon`` orthogonalises in bfloat16, one matrix at a time, which on a CPU costs as much
as the backward pass.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024); parameters are 2-D."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for param in group["params"]:
                by_shape.setdefault(param.shape, []).append(param)
            for params in by_shape.values():
                self._step_alike(params, group["lr"], group["momentum"])

    def _step_alike(self, params: list[Tensor], lr: float, momentum: float) -> None:
        moves = []
        for param in params:
            assert param.grad is not None
            state = self.state[param]
            mean = state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 1 - momentum)
            moves.append(param.grad.lerp(mean, momentum))
        rows, columns = params[0].shape
        scale = lr * max(1.0, rows / columns) ** 0.5
        for param, move in zip(params, _orthogonal(torch.stack(moves)), strict=True):
            param.sub_(move, alpha=scale)


def _orthogonal(matrices: Tensor) -> Tensor:
    """[N, R, C] -> the same with singular values near 1 (quintic Newton-Schulz, five rounds)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
