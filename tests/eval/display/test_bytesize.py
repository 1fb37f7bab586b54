"""Bytes in words."""

import pytest

from kvpolicies.eval.display.bytesize import size


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (150 * 1024, "150 KiB"),
     (-3 * 2**20, "-3.0 MiB"), (5 * 2**40, "5,120 GiB")],
)  # fmt: skip
def test_bytes_are_said_in_the_largest_unit_that_fits(count, said):
    assert size(count) == said
