"""A subject that keeps 1 MiB for each input."""

from __future__ import annotations

from pathlib import Path
from random import Random

from scripts.fuzzing.worker import Files

_LEAKED: list[bytes] = []


def make(rng: Random) -> Files:
    """Return a few bytes."""
    return {"input": rng.randbytes(4)}


def run(folder: Path) -> None:
    """Keep memory that is never used again."""
    _LEAKED.append((folder / "input").read_bytes() * 2**18)
