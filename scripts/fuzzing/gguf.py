"""Fuzz the checks before a GGUF load: damaged counts, keys, values, tensor descriptions and data."""

from __future__ import annotations

from pathlib import Path
from random import Random

from edgespec.backends.llamacpp.header_validation import check_headers
from edgespec.model.formats.gguf_metadata import read_gguf_info
from scripts.fuzzing.gguf_files import make_gguf
from scripts.fuzzing.worker import Files


def make(rng: Random) -> Files:
    """Return a small model with random changes."""
    return {"model.gguf": make_gguf(rng)}


def run(folder: Path) -> None:
    """Read the metadata, and validate the header, as every plan and load does."""
    path = folder / "model.gguf"
    read_gguf_info(path)
    check_headers([path])
