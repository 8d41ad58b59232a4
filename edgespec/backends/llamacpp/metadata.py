"""What a GGUF file says about its model."""

from __future__ import annotations

import ctypes
from typing import Any

from edgespec.backends.llamacpp.native import library

__all__ = ["all_metadata", "metadata"]


def metadata(weights: Any, key: str) -> str | None:
    """A metadata value as text, None when the file has no such key."""
    buffer = ctypes.create_string_buffer(4096)
    count = library().llama_model_meta_val_str(weights, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if count >= 0 else None


def all_metadata(weights: Any) -> dict[str, str]:
    """Every metadata value as text, arrays left out; values longer than 4 kB are cut."""
    lib = library()
    buffer = ctypes.create_string_buffer(4096)

    def text(count: int) -> str:
        return buffer.value.decode("utf-8", "replace") if count >= 0 else ""

    return {
        text(lib.llama_model_meta_key_by_index(weights, i, buffer, len(buffer))): text(
            lib.llama_model_meta_val_str_by_index(weights, i, buffer, len(buffer))
        )
        for i in range(lib.llama_model_meta_count(weights))
    }
