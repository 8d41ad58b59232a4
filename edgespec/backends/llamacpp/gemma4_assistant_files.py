"""Recognise Gemma 4 assistants in GGUF files, and check that they match their target.

A Gemma 4 assistant is a head for multi-token prediction (MTP) that reads the target's KV cache instead of
having its own. If the shapes do not match, llama.cpp aborts the process instead of returning an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.errors import CapabilityError, ModelFileError, shorten
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import GgufHeader, read_header

__all__ = ["ASSISTANT", "ASSISTANT_TARGET", "check_assistant", "is_assistant"]

# The architectures of the heads and of their targets.
ASSISTANT, ASSISTANT_TARGET = "gemma4-assistant", "gemma4"
# The ggml type F32.
_F32 = 0


class _KvShape(NamedTuple):
    """The number of KV heads of a layer, and the number of dimensions of each."""

    heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.heads:,} KV head{'' if self.heads == 1 else 's'} of size {self.size:,}"


def is_assistant(path: Path) -> bool:
    """Return whether a GGUF file contains a Gemma 4 assistant. Raises ModelFileError if it is damaged."""
    return read_header(gguf_files(path)[0]).architecture == ASSISTANT


def check_assistant(path: Path, target: Path, target_name: str) -> None:
    """Check that a Gemma 4 assistant can read its target's KV cache.

    Args:
        path: The file of the assistant.
        target: The target's file.
        target_name: The target's name, for messages.

    Raises:
        CapabilityError: The assistant was made for a different target.
        ModelFileError: A file is damaged.
    """
    own, needed = (read_header(gguf_files(each)[0]) for each in (path, target))
    if problem := _problem(own):
        raise ModelFileError(
            f"the head {path} is damaged: {problem}", "download it again, or use --head none"
        )
    if mismatch := _mismatch(own, needed):
        raise CapabilityError(
            f"the head {path} was made for another model: it needs {mismatch} as in {target_name}",
            "choose the head that was published for this model",
            code="head_mismatch",
        )


def _problem(header: GgufHeader) -> str:
    """Return why llama.cpp cannot run the head with any target, or an empty string."""
    layers, predicting = map(header.architecture_number, ("block_count", "nextn_predict_layers"))
    windowed = _windowed(header)
    if layers != predicting or layers != len(windowed) or len(set(windowed)) != 2:
        return f"its {layers:,} layers must all be MTP layers, some with a sliding window and some without"
    if not header.architecture_number("attention.sliding_window"):
        return "the size of its sliding window is missing"
    for layer, is_windowed in enumerate(windowed):
        heads, kv = _heads(header, layer), _kv_shape(header, layer, is_windowed)
        if not (heads and kv.heads and kv.size) or heads % kv.heads:
            return f"its layer {layer} has {heads:,} heads, but {kv}"
        values = header.architecture_number(f"attention.value_length{_suffix(is_windowed)}")
        if values != kv.size:
            return f"its layer {layer} has keys of size {kv.size:,} but values of size {values:,}"
        rotated = _rotated(header, is_windowed)
        if rotated % 2 or not 0 < rotated <= kv.size:
            return f"its layer {layer} applies RoPE to {rotated:,} of {kv.size:,} dimensions"
    vectors = (each for each in header.tensors if len(each.shape) == 1)
    wrong = next((each.name for each in vectors if each.kind != _F32), "")
    return f"its {shorten(wrong)} must have type F32" if wrong else ""


def _mismatch(own: GgufHeader, needed: GgufHeader) -> str:
    """Describe a property that the head requires but the target lacks, or return an empty string."""
    if needed.architecture != ASSISTANT_TARGET:
        return f"a model with the architecture {ASSISTANT_TARGET!r}, not {shorten(needed.architecture)!r}"
    size = own.architecture_number("embedding_length_out")
    target_size = needed.architecture_number("embedding_length")
    if size != target_size:
        return f"hidden states of size {size:,}, not {target_size:,}"
    windowed, layers = _windowed(needed), needed.architecture_number("block_count")
    # In llama.cpp, sliding-window layers read the KV cells of the target's second to last layer, and all
    # other layers read those of its last layer.
    if len(windowed) != layers or windowed[-2:] != [True, False]:
        return "a sliding window in the second to last layer but not in the last one, unlike"
    own_kv = layers - needed.architecture_number("attention.shared_kv_layers")
    for layer, is_windowed in enumerate(_windowed(own)):
        from_end = 2 if is_windowed else 1
        # The target's last layers may have no KV cells of their own and share those of the last two layers
        # that do.
        read = layers - from_end if layers - from_end < own_kv else own_kv - from_end
        shape, target_shape = _kv_shape(own, layer, is_windowed), _kv_shape(needed, read, is_windowed)
        if shape != target_shape:
            return f"{shape} for its layer {layer}, not {target_shape}"
    return ""


def _heads(header: GgufHeader, layer: int, key: str = "attention.head_count") -> int:
    """Return the number of heads of a layer. The metadata has one value for all layers or one per layer."""
    value = header.architecture_value(key)
    if isinstance(value, np.ndarray):
        return int(value[layer]) if 0 <= layer < len(value) and value.dtype.kind in "iu" else 0
    return header.architecture_number(key)


def _kv_shape(header: GgufHeader, layer: int, is_windowed: bool) -> _KvShape:
    key = "attention.head_count_kv"
    heads = _heads(header, layer) if header.architecture_value(key) is None else _heads(header, layer, key)
    return _KvShape(heads, header.architecture_number(f"attention.key_length{_suffix(is_windowed)}"))


def _suffix(is_windowed: bool) -> str:
    return "_swa" if is_windowed else ""


def _rotated(header: GgufHeader, is_windowed: bool) -> int:
    """Return the number of rotary dimensions per attention head, or llama.cpp's default if it is not set."""
    keys = ("rope.dimension_count_swa", "rope.dimension_count", "attention.key_length")
    present = (key for key in keys[not is_windowed :] if header.architecture_value(key) is not None)
    return header.architecture_number(next(present, ""))


def _windowed(header: GgufHeader) -> list[bool]:
    """Return one flag per layer: whether it uses sliding-window attention."""
    pattern = header.architecture_value("attention.sliding_window_pattern")
    return [bool(each) for each in pattern] if isinstance(pattern, np.ndarray) else []
