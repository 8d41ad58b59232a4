"""Validates GGUF headers, because llama.cpp aborts the process on some invalid values.

Each check here corresponds to an assertion, a division by zero or an unchecked allocation in llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.gguf_files import gguf_files
from edgespec.backends.gguf_header import GgufHeader, StringArray, read_header
from edgespec.errors import ModelFileError

__all__ = ["check_header"]

# LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS.
_MAX_LAYERS = 512
_MAX_EXPERTS = 1024
# The largest accepted sizes, which llama.cpp divides by or allocates without a check. Chosen: far above any
# model's.
_MAX_COUNTS = {
    "embedding_length": 1 << 20,
    "attention.head_count": 1 << 14,
    "attention.head_count_kv": 1 << 14,
    "feed_forward_length": 1 << 24,
    "context_length": (1 << 31) - 1,
}
_EPSILONS = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.group_norm_epsilon",
)
# Architectures in which llama.cpp ignores a single expert.
_SINGLE_EXPERT_IGNORED = ("hunyuan-dense", "hunyuan_vl")
# ggml types without a matrix multiplication, for which llama.cpp would call a null pointer.
_NOT_WEIGHT_TYPES = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_F32 = 0
# Tensors that llama.cpp reads as F32 without checking their type.
_ALWAYS_F32 = (".ssm_a", ".ssm_d", ".ssm_conv1d.weight")
# Tensors that are integer tables, not weights.
_TABLES = ("tid2eid",)
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Architectures whose recurrent layers must be twice as wide as the others.
_DOUBLE_WIDTH_SSM = ("jamba", "granitehybrid")
# llama.cpp requires this alignment of mapped weights.
_ALIGNMENT_BYTES = 32


def check_header(path: Path) -> None:
    """Check the headers of all files of a model.

    Args:
        path: The file, or the first part of a model in several files.

    Raises:
        ModelFileError: A file cannot be read, or has a header that llama.cpp would abort on.
    """
    for part in gguf_files(path):
        try:
            status = part.stat()
        except OSError as error:
            raise ModelFileError(
                f"{part} cannot be read: {error.strerror or error}", "check the path and its permissions"
            ) from error
        _check(part, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _check(path: Path, _size_bytes: int, _changed_ns: int) -> None:
    """Check a file once per version, because reading a large vocabulary takes a while."""
    try:
        header = read_header(path)
    except ModelFileError:
        return  # llama.cpp rejects unreadable headers itself, with a better message
    problem = (
        _count_problem(header)
        or _expert_problem(header)
        or _epsilon_problem(header)
        or _vocabulary_problem(header)
        or _tensor_problem(header)
    )
    if problem:
        raise ModelFileError(f"{path} is damaged: {problem}", "download it again, or choose another model")


def _count_problem(header: GgufHeader) -> str:
    """Return what is wrong with the counts and sizes of the header, or ""."""
    layers = header.architecture_value("block_count")
    if isinstance(layers, int) and not 0 < layers <= _MAX_LAYERS:
        return f"its layer count is {layers:,}, outside 1 to {_MAX_LAYERS}"
    mtp_layers = header.architecture_value("nextn_predict_layers", 0)
    if isinstance(layers, int) and isinstance(mtp_layers, int) and mtp_layers > layers:
        return f"its {layers:,} layers include {mtp_layers:,} multi-token prediction layers"
    for key, max_value in _MAX_COUNTS.items():
        value = header.architecture_value(key)
        if isinstance(value, int) and value > max_value:
            return f"its {key} is {value:,}, above {max_value:,}"
    scaling = header.architecture_value("rope.scaling.type", "none")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        return f"its rope.scaling.type is {scaling[:40]!r}, which llama.cpp does not support"
    inner, size = header.architecture_value("ssm.inner_size"), header.architecture_value("embedding_length")
    if header.architecture in _DOUBLE_WIDTH_SSM and isinstance(inner, int) and inner != 2 * size:
        return f"its ssm.inner_size is {inner:,}, not twice its embedding_length"
    return ""


def _expert_problem(header: GgufHeader) -> str:
    """Return what is wrong with the numbers of experts, or ""."""
    experts, used = _largest(header, "expert_count"), _largest(header, "expert_used_count")
    groups, groups_used = _largest(header, "expert_group_count"), _largest(header, "expert_group_used_count")
    if experts <= 1 and header.architecture in _SINGLE_EXPERT_IGNORED:
        return ""
    if experts > _MAX_EXPERTS or used > experts or (experts and not used):
        return f"it uses {used:,} of {experts:,} experts"
    if (groups and groups >= experts) or (groups > 1 and (experts % groups or not 0 < groups_used < groups)):
        return f"it uses {groups_used:,} of {groups:,} groups of {experts:,} experts"
    if header.architecture and not experts and any("_exps." in tensor.name for tensor in header.tensors):
        return "it has experts, but no expert_count"
    return ""


def _largest(header: GgufHeader, key: str) -> int:
    """Return an integer of the header, or the largest of a list with one per layer; 0 if it is missing."""
    value: Any = header.architecture_value(key, 0)
    if isinstance(value, np.ndarray):
        return int(value.max()) if value.size and value.dtype.kind in "iub" else 0
    return value if isinstance(value, int) else 0


def _epsilon_problem(header: GgufHeader) -> str:
    """Return what is wrong with the epsilons of the norms, or ""."""
    for key in _EPSILONS:
        epsilon = header.architecture_value(key)
        if isinstance(epsilon, float) and not 0 <= epsilon < math.inf:
            return f"its {key} is {epsilon}"
    return ""


def _vocabulary_problem(header: GgufHeader) -> str:
    """Return what is wrong with the vocabulary, or ""."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        return ""
    if duplicates := _duplicate_count(tokens):
        return f"its vocabulary has {duplicates:,} duplicate tokens"
    if header.metadata.get("tokenizer.ggml.model") == "llama":
        # Characters without a token are split into bytes, and llama.cpp aborts if one of these has no token.
        byte_tokens = {name: byte for byte in range(256) for name in (b"<0x%02X>" % byte, bytes([byte]))}
        bytes_present = {byte_tokens[name] for name in _token_texts(tokens) if name in byte_tokens}
        if missing := 256 - len(bytes_present):
            return f"its vocabulary has no token for {missing:,} of the 256 bytes"
    return ""


def _token_texts(tokens: StringArray) -> Iterator[bytes]:
    """Yield the tokens as llama.cpp reads them: up to a zero byte, and without the empty ones it renames."""
    return (text for token in tokens if (text := token.partition(b"\0")[0]))


def _duplicate_count(tokens: StringArray) -> int:
    """Return the number of tokens that repeat an earlier one."""
    # Comparing hashes takes much less memory than a set of all tokens.
    hashes = np.sort(np.fromiter(map(hash, _token_texts(tokens)), np.int64))
    if not (hashes[1:] == hashes[:-1]).any():
        return 0
    texts = list(_token_texts(tokens))
    return len(texts) - len(set(texts))


def _tensor_problem(header: GgufHeader) -> str:
    """Return what is wrong with the types or offsets of the tensors, or ""."""
    for tensor in header.tensors:
        if tensor.kind in _NOT_WEIGHT_TYPES and not tensor.name.endswith(_TABLES):
            return f"its {tensor.name[:80]} has the type {_NOT_WEIGHT_TYPES[tensor.kind]}, not a weight type"
        small = len(tensor.shape) == 1 and tensor.name.endswith(("norm.weight", ".bias"))
        if tensor.kind != _F32 and (small or tensor.name.endswith(_ALWAYS_F32)):
            return f"its {tensor.name[:80]} is not of type F32, as it must be"
    if header.tensors:
        begin = header.size_bytes + min(tensor.offset_bytes for tensor in header.tensors)
        if begin % _ALIGNMENT_BYTES:
            return f"its weights begin at byte {begin:,}, not at a multiple of {_ALIGNMENT_BYTES}"
    return ""
