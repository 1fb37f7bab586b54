"""Constraints of options: declared once, one error line each."""

from dataclasses import dataclass

import pytest

from kvpolicies.errors import UserError
from kvpolicies.options import check_options, option


@dataclass(frozen=True)
class Sample:
    """One option of each kind."""

    count: int = option(1, "a number", least=1)
    few: int = option(2, least=1, most=4)
    kernel: int = option(5, least=1, odd=True)
    share: float = option(0.5, least=0, below=1)
    rate: float = option(1.0, above=0)
    limit: int | None = option(None, least=2)
    kind: str = option("alpha", choices=("alpha", "beta"))
    free: str = option("", "anything")
    plain: int = 3

    def __post_init__(self) -> None:
        check_options(self, "sample: ")


def test_what_a_constraint_allows():
    Sample(
        count=10**6, few=4, kernel=7, share=0, rate=1e-9, limit=2, kind="beta", free="x", plain=-1
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("count", 0, "must be at least 1, got 0"),
        ("count", 2.5, "must be a whole number, got 2.5"),
        ("count", True, "must be a whole number, got True"),
        ("count", 1 << 70, f"must be at most {1 << 62}, got {1 << 70}"),
        ("few", 5, "must lie in [1, 4], got 5"),
        ("kernel", 4, "must be odd, got 4"),
        ("share", 1, "must lie in [0, 1), got 1"),
        ("share", -0.1, "must lie in [0, 1), got -0.1"),
        ("rate", 0.0, "must be above 0, got 0.0"),
        ("rate", float("inf"), "must be a finite number, got inf"),
        ("rate", float("nan"), "must be a finite number, got nan"),
        ("limit", 1, "must be at least 2, got 1"),
        ("kind", "c", "must be one of alpha, beta, got 'c'"),
        ("kind", "alphy", "must be one of alpha, beta, got 'alphy'; did you mean 'alpha'?"),
    ],
)
def test_what_it_refuses(name, value, said):
    with pytest.raises(UserError) as error:
        Sample(**{name: value})
    assert str(error.value) == f"sample: {name} {said}"
