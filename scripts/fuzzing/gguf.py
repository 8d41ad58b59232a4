"""GGUF files: damaged counts, keys, values, tensor descriptions and data, read as before a load."""

from __future__ import annotations

from pathlib import Path
from random import Random

import edgespec
from edgespec.backends.llamacpp.header_validation import check_header
from scripts.fuzzing.gguf_files import make_gguf
from scripts.fuzzing.worker import Files


def make(rng: Random) -> Files:
    """Return a small model with one or a few changes."""
    return {"model.gguf": make_gguf(rng)}


def run(folder: Path) -> None:
    """Plan a load, and validate the header as every load does."""
    path = folder / "model.gguf"
    edgespec.plan(str(path), None, threads=1)
    check_header(path)
