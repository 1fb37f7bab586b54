"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# What asks the hub is told at once that there is none, in processes of its own too.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("same every time", derandomize=True)
settings.load_profile("same every time")


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The slow numpy references of the policies (tests/reference/api.py)."""
    from tests.reference import api

    return api


@pytest.fixture(scope="session", autouse=True)
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A hub without network, that has random scorers (tests/support/scorers.py)."""
    import huggingface_hub

    root: list[Path] = []

    def download(name: str, **options: object) -> str:
        from tests.support import scorers

        if not root:
            root.append(tmp_path_factory.mktemp("hub"))
        return scorers.download(root[0], name, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", download)
        yield
