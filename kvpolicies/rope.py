"""Rotary position embedding as policies need it: forwards to any position, and back.

The adapter hands in the model's own cos and sin, so scaled variants (YaRN, Llama-3, linear) and
partial rotation come out as the model computes them. Source: RoFormer, arXiv 2104.09864, Eq. 34, in
the half-split layout of transformers' `rotate_half`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpolicies.errors import UserError


class Rope:
    """cos and sin by position, tabulated once and grown by doubling.

    Args:
        cos_sin: maps positions [1, P] int64 to the model's own (cos, sin), each [1, P, R] with
            R <= D the rotated part of a head; None for a layer without positions (NoPE).
        limit: the length up to which cos and sin do not depend on the length (LongRoPE and dynamic
            scaling change beyond it); None = at any length.
    """

    def __init__(
        self,
        cos_sin: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
        limit: int | None = None,
    ):
        self._cos_sin, self._limit = cos_sin, limit
        self._cos = self._sin = torch.empty(0, 0)

    def prepare(self, length: int, device: torch.device) -> None:
        """Tabulates positions 0 .. length - 1.

        Raises:
            UserError: beyond the limit.
        """
        if self._cos_sin is None or length <= self._cos.shape[0]:
            return
        size = max(length, 2 * self._cos.shape[0])
        if self._limit is not None:
            size = min(size, self._limit)
            if length > size:
                raise UserError(
                    f"a sequence of {length} tokens: beyond {self._limit} the model's RoPE changes "
                    "with the length, and this policy rotates queries itself"
                )
        cos, sin = self._cos_sin(torch.arange(size, device=device)[None])
        self._cos, self._sin = cos[0].float(), sin[0].float()

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x [B, ..., N, D] to positions [B, N] (or [B, ..., N]); float32 result."""
        if self._cos_sin is None:
            return x.float()
        cos, sin = self._at(positions, x.dim())
        return _turn(x.float(), cos, sin)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undoes `rotate`: x [B, ..., N, D] as it was before RoPE; float32, exact up to rounding.

        A scaled cos and sin (YaRN's attention factor s) is divided out: cos^2 + sin^2 = s^2.
        """
        if self._cos_sin is None:
            return x.float()
        cos, sin = self._at(positions, x.dim())
        square = cos * cos + sin * sin
        return _turn(x.float(), cos / square, -sin / square)

    def rotate_ahead(self, x: Tensor, positions: Tensor, n: int) -> Tensor:
        """x [B, ..., D], not rotated, under the mean rotation to the n positions after `positions`
        [B]; float32 result."""
        if self._cos_sin is None:
            return x.float()
        self.prepare(n + 1, x.device)
        cos, sin = self._cos[positions], self._sin[positions]
        # Angles add up, and a scale (YaRN's) is in both factors.
        scale = (cos * cos + sin * sin).sqrt()
        on_cos, on_sin = self._cos[1 : n + 1].mean(dim=0), self._sin[1 : n + 1].mean(dim=0)
        both = ((cos * on_cos - sin * on_sin) / scale, (sin * on_cos + cos * on_sin) / scale)
        return _turn(
            x.float(), *(part.view(-1, *[1] * (x.dim() - 2), part.shape[-1]) for part in both)
        )

    def _at(self, positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        if positions.dim() == 2:  # one position for all heads
            positions = positions[(slice(None), *([None] * (dim - 3)))]
        return self._cos[positions], self._sin[positions]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
