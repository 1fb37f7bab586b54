"""What several Triton kernels do with a tile: products as exact as their operands, soft caps."""

from __future__ import annotations

from kvpolicies.kernels.jit import UPCAST, jit, tl

# Logits of what is not seen: far below all others, finite, so that differences are never NaN.
FLOOR = -3e38 if tl is None else tl.constexpr(-3e38)


@jit
def product(a, b):
    """a [M, K] times b [K, N], float32, of float32 or 16-bit operands.

    Of one dtype: tensor cores where it has 16 bits, else float32 throughout. Where float32 meets 16
    bits, it is taken in two halves of 16 bits, good for a mantissa of 16, so that tensor cores
    serve.
    """
    if a.dtype == b.dtype:
        out = _dot(a, b)
    elif a.dtype == tl.float32:
        high = a.to(b.dtype)
        out = _dot(high, b) + _dot((a - high.to(tl.float32)).to(b.dtype), b)
    elif b.dtype == tl.float32:
        high = b.to(a.dtype)
        out = _dot(a, high) + _dot(a, (b - high.to(tl.float32)).to(a.dtype))
    else:
        out = _dot(a.to(tl.float32), b.to(tl.float32))
    return out


@jit
def _dot(a, b):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def as_logits(products, scale, cap, CAPPED: tl.constexpr):
    """scale * products, softly limited to +-cap (see softmax.py)."""
    logits = products * scale
    if CAPPED:
        # tanh by exp, which every target has; off by at most 1e-7 of the cap.
        shrunk = tl.exp(-2 * tl.abs(logits) / cap)
        size = cap * (1 - shrunk) / (1 + shrunk)
        logits = tl.where(logits < 0, -size, size)
    return logits
