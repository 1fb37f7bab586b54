"""Fixtures for all tests."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The slow numpy references of the policies (tests/reference/api.py)."""
    from tests.reference import api

    return api
