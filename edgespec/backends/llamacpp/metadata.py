"""Read the metadata of a loaded GGUF model."""

from __future__ import annotations

import ctypes
from typing import Any

from edgespec.backends.llamacpp.native import library

__all__ = [
    "all_metadata",
    "architecture_metadata",
    "has_compressed_keys",
    "has_state",
    "metadata",
    "sliding_window",
    "vocabulary_size",
]

# Maximum length of a metadata value in bytes. Longer values are truncated, which is acceptable because only
# numbers and short names are needed.
_MAX_VALUE_BYTES = 4096


def metadata(weights: Any, key: str) -> str | None:
    """Return a value from a model's GGUF metadata as a string, or None if the key does not exist."""
    buffer = ctypes.create_string_buffer(_MAX_VALUE_BYTES)
    count = library().llama_model_meta_val_str(weights, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if count >= 0 else None


def architecture_metadata(weights: Any, key: str) -> str | None:
    """Return the value of a key prefixed with the architecture, such as `llama.block_count`, or None."""
    return metadata(weights, f"{metadata(weights, 'general.architecture')}.{key}")


def all_metadata(weights: Any) -> dict[str, str]:
    """Return a model's GGUF metadata, except arrays, as a dict of strings."""
    lib = library()
    buffer = ctypes.create_string_buffer(_MAX_VALUE_BYTES)

    def text(count: int) -> str:
        return buffer.value.decode("utf-8", "replace") if count >= 0 else ""

    return {
        text(lib.llama_model_meta_key_by_index(weights, i, buffer, len(buffer))): text(
            lib.llama_model_meta_val_str_by_index(weights, i, buffer, len(buffer))
        )
        for i in range(lib.llama_model_meta_count(weights))
    }


def has_state(weights: Any) -> bool:
    """Return whether the model has recurrent layers."""
    return bool(library().llama_model_is_recurrent(weights) or library().llama_model_is_hybrid(weights))


def has_compressed_keys(weights: Any) -> bool:
    """Return whether attention combines a sliding window with compressed keys of earlier tokens.

    llama.cpp stores the sequences of such a model separately, and can copy only whole sequences.
    """
    return metadata(weights, "general.architecture") == "deepseek4"


def sliding_window(weights: Any) -> int:
    """Return the size of the sliding attention window in tokens, or 0 if all layers use full attention."""
    if has_compressed_keys(weights):
        # `llama_model_n_swa` returns 0 for these models, because their cache cannot be rolled back within the
        # window.
        return int(architecture_metadata(weights, "attention.sliding_window") or 0)
    return int(library().llama_model_n_swa(weights))


def vocabulary_size(weights: Any) -> int:
    """Return the number of tokens in the model's vocabulary."""
    lib = library()
    return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights)))
