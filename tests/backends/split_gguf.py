"""Tiny GGUF models in several parts."""

from __future__ import annotations

from pathlib import Path

from edgespec.loading.prepare.gguf_parts import GgufParts, split_metadata, write_gguf
from tests.backends.tiny_models import write_llama

COUNT = 3


def write_parts(folder: Path, name: str = "d", seed: int = 0, layers: int = 1) -> list[Path]:
    """Write a tiny model in three parts, as `llama-gguf-split` does."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = GgufParts([write_llama(folder / "whole.gguf", seed=seed, layers=layers)])
    metadata, names = whole.metadata(0, whole.layer_count), [*whole.tensors]
    paths = []
    for number in range(COUNT):
        path = folder / f"{name}-{number + 1:05}-of-{COUNT:05}.gguf"
        own = {each: whole.tensors[each] for each in names[number::COUNT]}
        split = split_metadata(number, COUNT, len(names))
        write_gguf(path, whole.architecture, (metadata if number == 0 else {}) | split, own)
        paths.append(path)
    (folder / "whole.gguf").unlink()
    return paths
