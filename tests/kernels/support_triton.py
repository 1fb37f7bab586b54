"""What the interpreter's cases share: poisoned outputs, and tensors of odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvpolicies.kernels.backend import backend
from kvpolicies.kernels.jit import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1, set by test_triton_interpreter", allow_module_level=True)

from triton.runtime import interpreter

POISON = {torch.float32: float("nan"), torch.bfloat16: float("nan"), torch.int64: -(1 << 62)}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

_patch = interpreter._patch_lang_tensor


def _patched(tensor, scope) -> None:
    # Triton 3.6 makes loop bounds by int(array of shape [1]), which numpy 2.4 refuses.
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched


@contextmanager
def on_triton() -> Iterator[None]:
    """Kernels are Triton's, and whatever they allocate is full of nonsense."""
    with backend("triton"), pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


def _poisoned(allocate):
    def allocated(*args, **kwargs) -> Tensor:
        out = allocate(*args, **kwargs)
        return out.fill_(POISON.get(out.dtype, -7))

    return allocated


def generator(seed: int) -> torch.Generator:
    """A seeded one."""
    return torch.Generator().manual_seed(seed)


def close(got: Tensor, expected: Tensor, atol: float) -> None:
    """Same shape and dtype, values within `atol`."""
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)
