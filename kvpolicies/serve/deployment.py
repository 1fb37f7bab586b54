"""What a deployment's file means to whatever runs it: its kernels."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvpolicies.errors import UserError


@contextmanager
def kernels(choice: str, model: Any) -> Iterator[None]:
    """Runs kernels by `choice`; what cannot run on the model's device is refused at once."""
    from kvpolicies.kernels.backend import backend, use_triton

    with ExitStack() as stack:
        try:
            stack.enter_context(backend(choice))
            use_triton(next(model.parameters()))
        except ValueError as error:
            raise UserError(str(error)) from None
        yield
