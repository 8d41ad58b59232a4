"""C++ functions of libllama that give access to hidden states, and that llama-cpp-python does not declare.

They are part of llama.cpp's staging header `llama-ext.h`, which can change with every release. If any of them
is missing, methods that need hidden states are unavailable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgespec.backends.llamacpp.native import library

__all__ = ["TAPPED_ARCHITECTURES", "StagingApi", "staging_api"]

# Architectures for which llama.cpp can copy the inputs of layers. For others, asking for them would end the
# process.
TAPPED_ARCHITECTURES = frozenset(
    {
        "bailingmoe3", "deepseek4", "gemma4", "hunyuan-vl", "lfm2", "llama", "mimo2", "minimax-01",
        "minimax-m2", "nanbeige", "nemotron-h", "openai-moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
        "qwen3next",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StagingApi:
    """The functions, named as in `llama-ext.h` without the prefix `llama_`.

    Attributes:
        set_embeddings_layer_inp: Makes a context copy the input of a layer in every pass.
        get_embeddings_layer_inp: Returns the address of these inputs, float32 [tokens, embedding size].
        set_embeddings_nextn: Makes the context of a head copy its hidden states in every pass.
        get_embeddings_nextn: Returns the address of these hidden states, float32 [tokens, embedding size].
        set_nextn_layer_offset: Chooses which layer for multi-token prediction a context runs.
        model_target_layer_ids: Returns the target's layers whose inputs a head reads.
        model_target_layer_ids_n: Returns the number of these layers.
    """

    set_embeddings_layer_inp: Callable[[Any, int, bool], None]
    get_embeddings_layer_inp: Callable[[Any, int], int]
    set_embeddings_nextn: Callable[[Any, bool, bool], None]
    get_embeddings_nextn: Callable[[Any], int]
    set_nextn_layer_offset: Callable[[Any, int], None]
    model_target_layer_ids: Callable[[Any], Any]
    model_target_layer_ids_n: Callable[[Any], int]


@cache
def staging_api() -> StagingApi | None:
    """Return the functions, or None if this version of llama.cpp lacks any of them."""
    pointer, number, flag = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool
    loaded = library().llama_cpp._lib
    functions = []
    for symbol, result, *arguments in (
        ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, pointer, number, flag),
        ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", pointer, pointer, number),
        ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, pointer, flag, flag),
        ("_Z26llama_get_embeddings_nextnP13llama_context", pointer, pointer),
        ("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, pointer, ctypes.c_int32),
        ("_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), pointer),
        ("_Z30llama_model_target_layer_ids_nPK11llama_model", number, pointer),
    ):
        try:
            function = getattr(loaded, symbol)
        except AttributeError:
            return None
        function.restype, function.argtypes = result, arguments
        functions.append(function)
    return StagingApi(*functions)
