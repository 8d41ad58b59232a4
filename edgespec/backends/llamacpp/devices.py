"""List the graphics cards that llama.cpp can use, and their free memory."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.native import ggml, library

__all__ = ["Card", "cards", "has_own_memory", "in_main_memory", "on_cpu"]

_GPU = 1


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card with its own memory."""

    name: str
    free_bytes: int
    total_bytes: int


def on_cpu(options: LoadOptions) -> bool:
    """Return whether a model runs entirely on the CPU."""
    return options.gpu_layers == 0 or not library().llama_supports_gpu_offload()


def in_main_memory(options: LoadOptions) -> bool:
    """Return whether a model is entirely in system memory. Apple GPUs also use system memory."""
    return sys.platform == "darwin" or on_cpu(options)


def cards() -> tuple[Card, ...]:
    """Return the graphics cards that llama.cpp can use.

    The result is empty on a Mac, where the GPU shares system memory, and if llama.cpp was built without GPU
    support.

    Raises:
        BackendMissingError: llama.cpp is not installed.
    """
    if sys.platform == "darwin" or not library().llama_supports_gpu_offload():
        return ()
    backend = ggml()
    found = []
    for i in range(backend.ggml_backend_dev_count()):
        device = backend.ggml_backend_dev_get(i)
        if backend.ggml_backend_dev_type(device) != _GPU:
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        backend.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = backend.ggml_backend_dev_name(device).decode("utf-8", "replace")
        found.append(Card(name, free.value, total.value))
    return tuple(found)


def has_own_memory() -> bool:
    """Return whether llama.cpp can use a graphics card with its own memory."""
    return bool(cards())
