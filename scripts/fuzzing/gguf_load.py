"""Fuzz GGUF loads: load a model, and generate a token if the load succeeds."""

from __future__ import annotations

from pathlib import Path
from random import Random

import edgespec
from scripts.fuzzing.gguf_files import make_gguf
from scripts.fuzzing.worker import Files


def make(rng: Random) -> Files:
    """Return a small model with random changes."""
    return {"model.gguf": make_gguf(rng)}


def run(folder: Path) -> None:
    """Load the model and generate one token."""
    path = str(folder / "model.gguf")
    with edgespec.load(path, None, context=256, threads=1, prefix_cache="none") as runtime:
        runtime.generate("Hello", max_tokens=1)
