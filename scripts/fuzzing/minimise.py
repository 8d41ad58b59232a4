"""Reduce a failing input with delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

import time
from collections.abc import Callable

from scripts.fuzzing.worker import Files

__all__ = ["minimise"]


def minimise(files: Files, fails: Callable[[Files], bool], seconds: float) -> dict[str, bytes]:
    """Remove files, then parts of files, as long as the input still fails.

    Args:
        files: The failing input.
        fails: Returns whether an input still fails in the same way.
        seconds: Time limit of the search.
    """
    end = time.monotonic() + seconds
    smallest = dict(files)
    for name in files:
        rest = {other: content for other, content in smallest.items() if other != name}
        if rest and time.monotonic() < end and fails(rest):
            smallest = rest
    for name in sorted(smallest, key=lambda each: -len(smallest[each])):
        parts = 2
        while time.monotonic() < end and parts <= 2 * len(smallest[name]):
            content = smallest[name]
            size = -(-len(content) // parts)
            for start in range(0, len(content), size):
                shorter = smallest | {name: content[:start] + content[start + size :]}
                if time.monotonic() < end and fails(shorter):
                    smallest, parts = shorter, max(2, parts - 1)
                    break
            else:
                parts *= 2
    return smallest
