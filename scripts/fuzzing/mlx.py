"""Fuzz the checks before an MLX load: damaged configurations, tokenizers, weight headers and indexes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import edgespec
from edgespec.model.formats.mlx_files import missing_files
from scripts.fuzzing.mlx_files import make_mlx
from scripts.fuzzing.worker import Files


def make(rng: Random) -> Files:
    """Return a model folder with random changes."""
    return {f"model/{name}": content for name, content in make_mlx(rng).items()}


def run(folder: Path) -> None:
    """Plan loading the model in `folder`."""
    missing_files(folder / "model")
    edgespec.plan(str(folder / "model"), None)
