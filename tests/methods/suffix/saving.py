"""Save replies in a folder, and load them as a new process does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.methods.suffix.corpus import SavedReplies

MARK, OTHER = "ab" * 32, "cd" * 32
SIZE = 100


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
