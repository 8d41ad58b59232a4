"""List the graphics cards that llama.cpp can use, and their free memory."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.native import library

__all__ = ["Card", "cards", "has_own_memory", "in_main_memory", "on_cpu"]

_GPU = 1


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card with its own memory."""

    name: str
    free_bytes: int
    total_bytes: int


@cache
def _ggml() -> Any:
    from llama_cpp import _ggml

    ggml = _ggml.libggml
    for name, result, arguments in (
        ("ggml_backend_dev_count", ctypes.c_size_t, []),
        ("ggml_backend_dev_get", ctypes.c_void_p, [ctypes.c_size_t]),
        ("ggml_backend_dev_type", ctypes.c_int, [ctypes.c_void_p]),
        ("ggml_backend_dev_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("ggml_backend_dev_memory", None, [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2]),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    return ggml


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
    ggml = _ggml()
    found = []
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        if ggml.ggml_backend_dev_type(device) != _GPU:
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = ggml.ggml_backend_dev_name(device).decode("utf-8", "replace")
        found.append(Card(name, free.value, total.value))
    return tuple(found)


def has_own_memory() -> bool:
    """Return whether llama.cpp can use a graphics card with its own memory."""
    return bool(cards())
