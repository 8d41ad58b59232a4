"""A subject that fails for inputs with an X."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from scripts.fuzzing.worker import Files


def make(rng: Random) -> Files:
    """Return some letters, of which few inputs have an X."""
    return {"input": "".join(rng.choice("abcdefgX") for _ in range(2)).encode()}


def run(folder: Path) -> None:
    """End the process for one input."""
    if b"X" in (folder / "input").read_bytes():
        os.abort()
