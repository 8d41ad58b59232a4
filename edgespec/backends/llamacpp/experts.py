"""Keep the experts of mixture-of-experts models in main memory while the other weights are on the GPU.

Each token uses only a few experts per layer, so the CPU reads only a small part of their weights. Attention,
shared weights and KV caches are used for every token, so they benefit the most from GPU memory.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from edgespec.backends.llamacpp.native import ggml
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import tensor_bytes
from edgespec.system.files import file_state

__all__ = ["expert_bytes", "experts_per_part", "keep_experts_in_memory"]

# Matches the names of expert weights and biases, except those of shared experts (`_shexp`), which every token
# uses.
_NAMES = r"ffn_(?:up|gate|down|gate_up)_(?:ch)?exps\."
_EXPERT = re.compile(rf"blk\.(\d+)\.{_NAMES}")


class _Override(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`: where to load tensors whose names match a pattern."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def expert_bytes(paths: str | Sequence[str]) -> dict[int, int]:
    """Return the size in bytes of each layer's experts, keyed by layer.

    Layers without experts are omitted.

    Args:
        paths: The model file, or all files of the model.

    Raises:
        ModelFileError: A file cannot be read or is truncated.
    """
    files = tuple(gguf_files(Path(paths)) if isinstance(paths, str) else map(Path, paths))
    return dict(_expert_bytes(files, tuple(map(file_state, files))))


# Cached because planning needs the sizes often, and reading a header with a large vocabulary is slow.
@lru_cache(maxsize=64)
def _expert_bytes(files: tuple[Path, ...], _file_states: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    found: dict[int, int] = {}
    for file in files:
        for name, size_bytes in tensor_bytes(file, read_header(file)):
            if match := _EXPERT.match(name):
                layer = int(match[1])
                found[layer] = found.get(layer, 0) + size_bytes
    return tuple(sorted(found.items()))


def experts_per_part(parts: Sequence[str | Sequence[str]], count: int | None) -> list[int]:
    """Divide the layers whose experts stay in main memory among the parts of a split model.

    These are the model's first layers with experts.

    Args:
        parts: The files of each part, in the order of the layers.
        count: Number of layers in the whole model whose experts stay in main memory. None means 0.

    Returns:
        The number of such layers in each part.
    """
    left, counts = count or 0, []
    for part in parts if left else ():
        counts.append(min(left, len(expert_bytes(part))))
        left -= counts[-1]
    return counts or [0] * len(parts)


def keep_experts_in_memory(params: Any, paths: str | Sequence[str], count: int) -> None:
    """Make llama.cpp load the experts of the first `count` layers that have experts into main memory.

    Args:
        params: llama.cpp's parameters for loading a model.
        paths: The model file, or all files of the model.
        count: Number of layers whose experts to load into main memory.
    """
    if count and (layers := tuple(expert_bytes(paths))[:count]):
        params.tensor_buft_overrides = ctypes.cast(_overrides(layers), ctypes.c_void_p)


@cache  # The arrays are never freed, because llama.cpp does not copy them.
def _overrides(layers: tuple[int, ...]) -> Any:
    numbers = "|".join(map(str, layers))
    pattern = rf"^blk\.(?:{numbers})\.{_NAMES}".encode()
    # A NULL pattern marks the end of the array.
    return (_Override * 2)(_Override(pattern, ggml().ggml_backend_cpu_buffer_type()))
