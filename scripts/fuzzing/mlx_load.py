"""Fuzz MLX loads: load a model, and generate a token if the load succeeds."""

from __future__ import annotations

from pathlib import Path
from random import Random

import edgespec
from scripts.fuzzing.mlx_files import make_mlx
from scripts.fuzzing.worker import Files


def make(rng: Random) -> Files:
    """Return a model folder with random changes."""
    return {f"model/{name}": content for name, content in make_mlx(rng).items()}


def run(folder: Path) -> None:
    """Load the model and generate one token."""
    with edgespec.load(str(folder / "model"), None, context=256, prefix_cache="none") as runtime:
        runtime.generate("Hello", max_tokens=1)
