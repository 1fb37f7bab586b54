"""Fixtures for all tests."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import settings

settings.register_profile("same every time", derandomize=True)
settings.load_profile("same every time")


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The slow numpy references of the policies (tests/reference/api.py)."""
    from tests.reference import api

    return api
