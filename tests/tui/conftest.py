"""The demo model, loaded anew for each chat, as the command does it."""

from __future__ import annotations

import pytest

import edgespec
from edgespec.catalog import Progress
from edgespec.tui.worker import Load


@pytest.fixture
def demo() -> Load:
    """Load the embedded demo pair."""

    def load(progress: Progress) -> edgespec.Runtime:
        return edgespec.load("demo", threads=1, progress=progress)

    return load
