"""Rotary position embedding as policies need it: forwards to any position, and back.

The adapter hands in the model's own cos and sin, so scaled variants (YaRN, Llama-3, linear) and
partial rotation come out as the model computes them. Source: RoFormer, arXiv 2104.09864, Eq. 34, in
the half-split layout of transformers' `rotate_half`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.transfer import on_device


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
        self._cos = self._sin = self._back_cos = self._back_sin = torch.empty(0, 0)

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
        cos, sin = self._cos, self._sin = cos[0].float(), sin[0].float()
        square = cos * cos + sin * sin
        self._back_cos, self._back_sin = cos / square, -sin / square

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x [B, ..., N, D] to positions [B, N] (or [B, ..., N]); float32 result."""
        if self._cos_sin is None:
            return x.float()
        at = _beside(positions, x.dim())
        return _turn(x.float(), self._cos[at], self._sin[at])

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undoes `rotate`: x [B, ..., N, D] as it was before RoPE; float32, exact up to rounding.

        A scaled cos and sin (YaRN's attention factor s) is divided out: cos^2 + sin^2 = s^2.
        """
        if self._cos_sin is None:
            return x.float()
        at = _beside(positions, x.dim())
        return _turn(x.float(), self._back_cos[at], self._back_sin[at])

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

    @property
    def rotated(self) -> int:
        """R, how many of a head's first numbers are rotated; 0 for a layer without positions."""
        if self._cos_sin is None:
            return 0
        self.prepare(2, self._cos.device)
        return self._cos.shape[-1]

    def rotate_over(self, x: Tensor, positions: Tensor, offsets: Sequence[int]) -> Tensor:
        """x [B, ..., D], not rotated, under the mean rotation to `positions` [B] plus each of the
        offsets, however far; float32 result."""
        if self._cos_sin is None:
            return x.float()
        self.prepare(2, x.device)
        # Angles of one step in float64, so that they can be multiplied.
        step = torch.atan2(self._sin[1].double(), self._cos[1].double())
        scale = (self._cos[1].double().square() + self._sin[1].double().square()).sqrt()
        far = on_device(list(offsets), x.device)
        angles = (positions.double()[:, None] + far)[..., None] * step  # [B, n, R]
        both = ((scale * f(angles)).mean(dim=1).float() for f in (torch.cos, torch.sin))
        return _turn(
            x.float(), *(part.view(-1, *[1] * (x.dim() - 2), part.shape[-1]) for part in both)
        )

    def sizes(self, x: Tensor) -> Tensor:
        """The length of each rotated pair of x [..., D], and the size of each other number:
        [..., R/2 + D - R], float32; a rotation changes it by its scale (YaRN's) alone."""
        half, size = self.rotated // 2, self.rotated
        first, second, rest = x.float().split((half, half, x.shape[-1] - size), dim=-1)
        return torch.cat((torch.hypot(first, second), rest.abs()), dim=-1)

    def scales(self, x: Tensor) -> Tensor:
        """What a rotation multiplies each of `sizes(x)` by: ones, or YaRN's factor."""
        half, size = self.rotated // 2, self.rotated
        ones = torch.ones(x.shape[-1] - half, device=x.device)
        if size:
            ones[:half] = torch.hypot(self._cos[1, :half], self._sin[1, :half])
        return ones


def _beside(positions: Tensor, dim: int) -> Tensor:
    """Positions of vectors of so many dimensions: [B, N] are those of all heads."""
    return positions[(slice(None), *([None] * (dim - 3)))] if positions.dim() == 2 else positions


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    first, second, rest = x.split((size // 2, size - size // 2, x.shape[-1] - size), dim=-1)
    (cos_1, cos_2), (sin_1, sin_2) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    turned = (first * cos_1 - second * sin_1, second * cos_2 + first * sin_2)
    return torch.cat((*turned, rest), dim=-1)
