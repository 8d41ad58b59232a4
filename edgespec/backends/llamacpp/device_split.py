"""The memory that a GGUF model takes on GPUs for a given number of offloaded layers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from edgespec.backends.gguf_files import gguf_files
from edgespec.errors import ModelFileError

__all__ = ["device_split"]

_LAYER = re.compile(r"blk\.(\d+)\.")


def device_split(path: str, layers: int, gpu_layers: int | None) -> tuple[int, float, int]:
    """Return the GPU memory that a model takes with `gpu_layers` offloaded layers.

    llama.cpp offloads the output layer first, then the last layers of the model. The token embedding stays
    in main memory. If it is also the output layer, it is copied to the GPU as well.

    Args:
        path: The GGUF file, or its first part.
        layers: The number of layers of the model.
        gpu_layers: The number of offloaded layers; None means all.

    Returns:
        The bytes of weights on the GPU, the fraction of the KV cache there, and the bytes of weights that
        are in both memories. All are 0 if nothing is offloaded.

    Raises:
        ModelFileError: The file cannot be read.
    """
    if not layers or gpu_layers == 0:
        return 0, 0.0, 0
    offloaded = min(layers, layers if gpu_layers is None else gpu_layers - 1)
    layer_bytes, output_bytes, tied_bytes = _layer_bytes(path)
    size = output_bytes + tied_bytes + sum(layer_bytes.get(i, 0) for i in range(layers - offloaded, layers))
    return size, offloaded / layers, tied_bytes


@cache
def _layer_bytes(path: str) -> tuple[dict[int, int], int, int]:
    """Return the bytes of each layer, of the output tensors, and of an embedding tied to the output."""
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
        raise ModelFileError(
            f"{path} is incomplete or damaged: {error}", "download it again and compare its size"
        ) from error
    return layer_bytes, output, embedding if tied else 0
