"""What a model is computed on: the graphics cards that llama.cpp sees, and what of their memory is free."""

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
    """A graphics card with memory of its own."""

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
    """Whether all of a model is computed by the processor."""
    return options.gpu_layers == 0 or not library().llama_supports_gpu_offload()


def in_main_memory(options: LoadOptions) -> bool:
    """Whether no part of it is in a card's own memory; an Apple GPU works in the system's."""
    return sys.platform == "darwin" or on_cpu(options)


def cards() -> tuple[Card, ...]:
    """The cards that llama.cpp would use; none where it is built for the processor only, or on a Mac.

    A Mac's graphics processor works in the system's memory. Raises BackendMissingError.
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
    """Whether weights can be put into a memory that is not the system's."""
    return bool(cards())
