"""Fuzz `edgespec.plan` with GGUF files, which it first reads in a child process, in case that crashes."""

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
    """Plan loading the model in `folder`."""
    edgespec.plan(str(folder / "model.gguf"), None, threads=1)
