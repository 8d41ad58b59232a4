"""How much of a GGUF model lies on graphics cards when so many of its layers are put there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from edgespec.backends.gguf_files import gguf_files
from edgespec.errors import ModelFileError

__all__ = ["device_split"]

_LAYER = re.compile(r"blk\.(\d+)\.")


def device_split(path: str, layers: int, gpu_layers: int | None) -> tuple[int, float, int]:
    """Bytes of weights there, the share of the cache, and bytes that are in both memories.

    llama.cpp puts the output layer there first, then the last of the others; the embedding stays, and where
    it is the output layer as well there are two of it. All 0 for 0 layers.
    """
    if not layers or gpu_layers == 0:
        return 0, 0.0, 0
    there = min(layers, layers if gpu_layers is None else gpu_layers - 1)
    by_layer, output, twice = _by_layer(path)
    size = output + twice + sum(by_layer.get(i, 0) for i in range(layers - there, layers))
    return size, there / layers, twice


@cache
def _by_layer(path: str) -> tuple[dict[int, int], int, int]:
    """Bytes of each layer, of what comes after the last, and of an embedding that is the head too."""
    import gguf

    by_layer: dict[int, int] = {}
    output = embedding = 0
    tied = True
    try:
        for part in gguf_files(Path(path)):
            for tensor in gguf.GGUFReader(part).tensors:
                if found := _LAYER.match(tensor.name):
                    layer = int(found[1])
                    by_layer[layer] = by_layer.get(layer, 0) + int(tensor.n_bytes)
                elif tensor.name.startswith("output"):
                    output += int(tensor.n_bytes)
                    tied = tied and tensor.name != "output.weight"
                elif tensor.name == "token_embd.weight":
                    embedding = int(tensor.n_bytes)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelFileError(
            f"{path} is incomplete or damaged: {error}", "download it again and compare its size"
        ) from error
    return by_layer, output, embedding if tied else 0
