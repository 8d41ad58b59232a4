"""Compute how much GPU memory a GGUF model needs for a given number of offloaded layers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from edgespec.backends.gguf_files import gguf_files
from edgespec.backends.gguf_header import read_header
from edgespec.backends.gguf_metadata import tensor_bytes

__all__ = ["device_split"]

_LAYER = re.compile(r"blk\.(\d+)\.")


def device_split(path: str, layers: int, gpu_layers: int | None) -> tuple[int, float, int]:
    """Return how much of a model is in GPU memory if `gpu_layers` layers are offloaded.

    llama.cpp offloads the output layer first, then the other layers from last to first. It keeps the token
    embedding in main memory, and copies it to the GPU if it is also the output layer.

    Returns:
        A tuple of the weight bytes on the GPU, the fraction of the KV cache on the GPU, and the weight bytes
        that are both on the GPU and in main memory. All are 0 if nothing is offloaded.

    Raises:
        ModelFileError: A file cannot be read or is truncated.
    """
    if not layers or gpu_layers == 0:
        return 0, 0.0, 0
    offloaded = min(layers, layers if gpu_layers is None else gpu_layers - 1)
    on_gpu = tied_bytes = 0
    tensors = _tensor_bytes(path)
    tied = not any(name == "output.weight" for name, _ in tensors)
    for name, size_bytes in tensors:
        if match := _LAYER.match(name):
            on_gpu += size_bytes if int(match[1]) >= layers - offloaded else 0
        elif name.startswith("output"):
            on_gpu += size_bytes
        elif name == "token_embd.weight" and tied:
            tied_bytes = size_bytes
    return on_gpu + tied_bytes, offloaded / layers, tied_bytes


@cache
def _tensor_bytes(path: str) -> list[tuple[str, int]]:
    return [pair for part in gguf_files(Path(path)) for pair in tensor_bytes(part, read_header(part))]
