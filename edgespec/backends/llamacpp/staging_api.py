"""Bindings for libllama functions that expose hidden states and that llama-cpp-python does not declare.

The functions are declared in llama.cpp's staging header `llama-ext.h`, which can change with every release.
If a function is missing, the drafting methods that need it are unavailable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgespec.backends.llamacpp.native import library

__all__ = [
    "TAPPED_ARCHITECTURES",
    "LayerInputApi",
    "NextnApi",
    "TargetLayersApi",
    "layer_input_api",
    "nextn_api",
    "target_layers_api",
]

# Architectures for which llama.cpp can copy layer inputs. With any other architecture, it aborts.
TAPPED_ARCHITECTURES = frozenset(
    {
        "bailingmoe3", "deepseek4", "gemma4", "hunyuan-vl", "lfm2", "llama", "mimo2", "minimax-01",
        "minimax-m2", "nanbeige", "nemotron-h", "openai-moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
        "qwen3next",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerInputApi:
    """Functions for reading the inputs of a context's layers.

    Attributes:
        switch: Makes a context copy a layer's input in every pass, or stop copying it.
        address: Returns the address of the copied input of a layer, float32 [tokens, embedding size].
    """

    switch: Callable[[Any, int, bool], None]
    address: Callable[[Any, int], int]


@dataclass(frozen=True, slots=True)
class NextnApi:
    """Functions that read the final hidden states and select the multi-token prediction (MTP) layer to run.

    Attributes:
        switch: Makes a context copy the final hidden states in every pass, or stop copying them. If the last
            argument is True, only tokens whose logits are requested are copied.
        address: Returns the address of the copied hidden states, float32 [tokens, embedding size].
        select_layer: Chooses the MTP layer that a context runs.
    """

    switch: Callable[[Any, bool, bool], None]
    address: Callable[[Any], int]
    select_layer: Callable[[Any, int], None]


@dataclass(frozen=True, slots=True)
class TargetLayersApi:
    """Functions that return which target layers a head reads.

    Attributes:
        ids: Returns a pointer to the indices of the target layers whose inputs the head reads.
        count: Returns the number of indices.
    """

    ids: Callable[[Any], Any]
    count: Callable[[Any], int]


_POINTER, _NUMBER, _FLAG = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool


@cache
def layer_input_api() -> LayerInputApi | None:
    """Return functions for reading layer inputs, or None if llama.cpp lacks any of them."""
    found = _functions(
        ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, _POINTER, _NUMBER, _FLAG),
        ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", _POINTER, _POINTER, _NUMBER),
    )
    return LayerInputApi(*found) if found else None


@cache
def nextn_api() -> NextnApi | None:
    """Return functions for MTP layers and final states, or None if llama.cpp lacks any of them."""
    found = _functions(
        ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, _POINTER, _FLAG, _FLAG),
        ("_Z26llama_get_embeddings_nextnP13llama_context", _POINTER, _POINTER),
        ("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, _POINTER, ctypes.c_int32),
    )
    return NextnApi(*found) if found else None


@cache
def target_layers_api() -> TargetLayersApi | None:
    """Return functions for a head's target layers, or None if llama.cpp lacks any of them."""
    found = _functions(
        ("_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), _POINTER),
        ("_Z30llama_model_target_layer_ids_nPK11llama_model", _NUMBER, _POINTER),
    )
    return TargetLayersApi(*found) if found else None


def _functions(*signatures: tuple[Any, ...]) -> list[Any]:
    """Load functions from libllama. Return an empty list if any of them is missing.

    Args:
        *signatures: (symbol, result type, *argument types) tuples.
    """
    loaded = library().llama_cpp._lib
    functions = []
    for symbol, result, *arguments in signatures:
        try:
            function = getattr(loaded, symbol)
        except AttributeError:
            return []
        function.restype, function.argtypes = result, arguments
        functions.append(function)
    return functions
