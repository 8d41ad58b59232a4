"""The demo model, loaded anew for each chat, as the command does it."""

from __future__ import annotations

import pytest

import edgespec
from edgespec.tui.model import Load, Progress, RuntimeLike


@pytest.fixture
def demo() -> Load:
    """Load the embedded demo pair."""

    def load(progress: Progress) -> RuntimeLike:
        return edgespec.load("demo", threads=1, progress=progress)

    return load
