"""Triton if it is there. Without it nothing here fails: kernels stay plain functions, never called.

Kernels use pointer arithmetic only (no block pointers, no tensor descriptors: Triton changed or
dropped these), so that Triton 3.6 to 3.9 run the same source. Their files begin with
`from __future__ import annotations`, for `tl.constexpr` in a signature must not be looked up where
there is no Triton; Triton reads the string.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:  # Triton is optional, so its types are not known

    class _Open(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Open):
        class constexpr(Any): ...

    triton: Any = ...
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""TRITON_INTERPRET=1 was set when kernels were imported: they run on CPU tensors, slowly."""

UPCAST: Any = INTERPRETED if tl is None else tl.constexpr(INTERPRETED)
"""The same for kernels: the interpreter's dot of two 16-bit operands is silently wrong."""


def jit(fn: Callable | None = None, *, varying: Sequence[str] = ()) -> Any:
    """`triton.jit`; without Triton the function itself.

    Args:
        varying: integer arguments that change from call to call, whose divisibility must not make
            another program each time.
    """
    if fn is None:
        return lambda f: _jit(f, varying)
    return _jit(fn, varying)


def _jit(fn: Callable, varying: Sequence[str]) -> Any:
    return fn if triton is None else triton.jit(fn, do_not_specialize=list(varying))


def triton_version() -> str | None:
    """Triton's version, such as "3.9.0"; None without Triton."""
    return None if triton is None else str(triton.__version__)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two >= n and >= `least`: the sizes that tiles have."""
    return max(least, 1 << max(0, n - 1).bit_length())


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if its last axis has stride 1, as kernels expect, else a copy that has."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
