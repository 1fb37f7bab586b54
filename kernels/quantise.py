"""Keys and values in fewer bits: symmetric codes with one scale a vector, a slot and head each.

x is stored as code * scale: scale = max |x| / top in float16, code = x / scale rounded to the
nearest (ties to even), where top is the largest code: 127 of int8, 7 of int4, 448 of fp8 (e4m3).
bf16 has no scale. Read back in float32. What numpy does in tests/kernels/test_quantise.py is the
reference; on a GPU the same lines run as they are, no fused kernel reads codes yet.

Shapes: [..., D] vectors; codes [..., W] with W = D, of int4 D / 2 (two codes a byte, the even
column's in the low half); scales [...] float16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TOP = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest code of each kind that has a scale."""
_LEAST, _MOST = 2.0**-24, 65504.0  # of float16
_FP8 = torch.float8_e4m3fn


class Codes(NamedTuple):
    """Vectors as they are stored."""

    codes: Tensor
    """[..., W]."""
    scales: Tensor | None
    """[...] float16; None of bf16."""


def layout(kind: str, width: int) -> tuple[int, torch.dtype]:
    """(W, dtype) of the codes of vectors of `width` numbers.

    Raises:
        ValueError: int4 of an odd width.
    """
    if kind == "int4":
        if width % 2:
            raise ValueError(f"int4 stores two numbers a byte, and the head size {width} is odd")
        return width // 2, torch.uint8
    # Moves gather and scatter codes, which torch does for uint8 and not for its float8.
    return width, {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8}[kind]


def scale_bytes(kind: str) -> int:
    """Bytes of a vector's scale: 0 where there is none."""
    return torch.float16.itemsize if kind in TOP else 0


def quantise(x: Tensor, kind: str) -> Codes:
    """The codes of x [..., D]. What is not finite stays so in bf16; with a scale it becomes NaN."""
    if kind == "bf16":
        return Codes(x.to(torch.bfloat16), None)
    x = x.float()
    top = TOP[kind]
    most = x.abs().amax(dim=-1)
    scales = (most / top).clamp(max=_MOST)
    scales = torch.where(most > 0, scales.clamp(min=_LEAST), scales).to(torch.float16)
    # A scale that was rounded down would leave the largest number beyond the largest code.
    scaled = (x / scales.float().clamp(min=_LEAST)[..., None]).clamp(-top, top)
    if kind == "fp8":
        return Codes(scaled.to(_FP8).view(torch.uint8), scales)
    codes = scaled.round().nan_to_num(0.0)
    if kind == "int8":
        return Codes(codes.to(torch.int8), scales)
    nibbles = (codes + 8).to(torch.uint8)
    return Codes(nibbles[..., ::2] | (nibbles[..., 1::2] << 4), scales)


def dequantise(stored: Codes, kind: str) -> Tensor:
    """The vectors [..., D] float32 that codes stand for."""
    codes, scales = stored
    if scales is None:
        return codes.float()
    if kind == "fp8":
        numbers = codes.view(_FP8).float()
    elif kind == "int8":
        numbers = codes.float()
    else:
        both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        numbers = both.float() - 8
    return numbers * scales.float()[..., None]
