"""The folder of the saved replies, saving replies in it, and loading them as a new process does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.methods.suffix.saved_replies import SavedReplies

MARK, OTHER = "ab" * 32, "cd" * 32
SIZE = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "replies"


def store(folder: Path, mark: str = MARK, max_tokens: int = 1000, size: int = SIZE) -> SavedReplies:
    return SavedReplies(mark, size, folder, max_tokens)


def kept(folder: Path, **options: Any) -> list[list[int]]:
    """Return what a new process loads."""
    return [reply.tolist() for reply in store(folder, **options).load()]


def fill(folder: Path, texts: Sequence[Sequence[int]] = ((1, 2, 3), (4, 5), (6,))) -> Path:
    first = store(folder)
    for text in texts:
        first.add(text)
    assert first.notice == ""
    return first.path
