"""Compute how much GPU memory a GGUF model needs for a given number of offloaded layers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from edgespec.backends.gguf_files import gguf_files
from edgespec.errors import ModelFileError

__all__ = ["device_split"]

_LAYER = re.compile(r"blk\.(\d+)\.")


def device_split(path: str, layers: int, gpu_layers: int | None) -> tuple[int, float, int]:
    """Return how much of a model is in GPU memory if `gpu_layers` layers are offloaded.

    llama.cpp offloads the output layer first, then the other layers from last to first. It keeps the token
    embedding in main memory, and copies it to the GPU if it is also the output layer.

    Args:
        path: The GGUF file, or the first file of a model in several parts.
        layers: The number of layers in the model.
        gpu_layers: The number of layers to offload. Defaults to all layers if None.

    Returns:
        A tuple of the weight bytes on the GPU, the fraction of the KV cache on the GPU, and the weight bytes
        that are both on the GPU and in main memory. All are 0 if nothing is offloaded.

    Raises:
        ModelFileError: A file is incomplete or damaged, or cannot be read.
    """
    if not layers or gpu_layers == 0:
        return 0, 0.0, 0
    offloaded = min(layers, layers if gpu_layers is None else gpu_layers - 1)
    layer_bytes, output_bytes, tied_bytes = _layer_bytes(path)
    size = output_bytes + tied_bytes + sum(layer_bytes.get(i, 0) for i in range(layers - offloaded, layers))
    return size, offloaded / layers, tied_bytes


@cache
def _layer_bytes(path: str) -> tuple[dict[int, int], int, int]:
    """Return the size in bytes of each layer, the output tensors, and the embedding if it is tied."""
    import gguf

    layer_bytes: dict[int, int] = {}
    output = embedding = 0
    tied = True
    try:
        for part in gguf_files(Path(path)):
            for tensor in gguf.GGUFReader(part).tensors:
                if match := _LAYER.match(tensor.name):
                    layer = int(match[1])
                    layer_bytes[layer] = layer_bytes.get(layer, 0) + int(tensor.n_bytes)
                elif tensor.name.startswith("output"):
                    output += int(tensor.n_bytes)
                    tied = tied and tensor.name != "output.weight"
                elif tensor.name == "token_embd.weight":
                    embedding = int(tensor.n_bytes)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{path} is incomplete or damaged: {error}", "download it again") from error
    return layer_bytes, output, embedding if tied else 0
