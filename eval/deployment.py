"""What a deployment's file means to whatever runs it: its budget and kernels."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvpolicies.budget import Budget, is_ratio
from kvpolicies.config import Deployment
from kvpolicies.errors import UserError


def budget_of(config: Deployment) -> Budget | str:
    """The budget with its sinks and window; a ratio stays one, of each sequence."""
    if is_ratio(config.budget):
        return config.budget
    return Budget.parse(config.budget, sinks=config.sinks, window=config.window)


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
