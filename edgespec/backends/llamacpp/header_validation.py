"""Validate GGUF headers, because some invalid values make llama.cpp abort the process.

Each check guards against an assertion, a division by zero or an unchecked allocation in llama.cpp. It returns
a description of the first problem that it finds, or an empty string.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError, shorten
from edgespec.model.formats.gguf_header import GgufHeader, StringArray, read_header

__all__ = ["check_headers"]

# The value of LLAMA_MAX_LAYERS in llama.cpp.
_MAX_LAYERS = 512
# The value of LLAMA_MAX_EXPERTS in llama.cpp.
_MAX_EXPERTS = 1024
# Maximum accepted value of each metadata key. Larger values can crash llama.cpp, and no real model comes
# close to them.
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
# Architectures for which an expert count of 1 in the metadata is valid, because llama.cpp ignores it.
_SINGLE_EXPERT_IGNORED = ("hunyuan-dense", "hunyuan_vl")
# ggml types that cannot be used for weights, because llama.cpp has no matrix multiplication for them.
_NOT_WEIGHT_TYPES = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_F32 = 0
# Name suffixes of tensors that llama.cpp reads as F32 without checking their type.
_ALWAYS_F32 = (".ssm_a", ".ssm_d", ".ssm_conv1d.weight")
# Name suffixes of tensors that may have an integer type, because they do not contain weights.
_TABLES = ("tid2eid", "d2t")
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Architectures whose `ssm.inner_size` must be twice the `embedding_length`.
_DOUBLE_WIDTH_SSM = ("jamba", "granitehybrid")
# The architecture that uses compressed keys.
_COMPRESSED_ARCHITECTURE = "deepseek4"
# The alignment in bytes that llama.cpp requires for memory-mapped weights.
_ALIGNMENT_BYTES = 32


def check_headers(files: Iterable[Path]) -> None:
    """Raise ModelFileError if a file of a GGUF model has a header that could make llama.cpp abort."""
    for part in files:
        try:
            status = part.stat()
        except OSError as error:
            raise ModelFileError(
                f"{part} cannot be read: {error.strerror or error}",
                "check the path and its permissions",
                code="model_file_unreadable",
            ) from error
        _check(part, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)  # Large headers are slow to read, so check each version of a file only once.
def _check(path: Path, _size_bytes: int, _changed_ns: int) -> None:
    try:
        header = read_header(path)
    except ModelFileError:
        return  # Ignore unreadable headers. llama.cpp rejects them with a better error message.
    problem = (
        _count_problem(header)
        or _expert_problem(header)
        or _compression_problem(header)
        or _epsilon_problem(header)
        or _vocabulary_problem(header)
        or _template_problem(header)
        or _tensor_problem(header)
    )
    if problem:
        raise ModelFileError(f"{path} is damaged: {problem}", "download it again or choose another model")


def _count_problem(header: GgufHeader) -> str:
    layers = header.architecture_value("block_count")
    if isinstance(layers, int) and not 0 < layers <= _MAX_LAYERS:
        return f"its number of layers must be from 1 to {_MAX_LAYERS}, not {layers:,}"
    mtp_layers = header.architecture_value("nextn_predict_layers", 0)
    if isinstance(layers, int) and isinstance(mtp_layers, int) and mtp_layers > layers:
        return f"it claims {mtp_layers:,} multi-token prediction layers, but has only {layers:,} layers"
    for key, max_value in _MAX_COUNTS.items():
        value = header.architecture_value(key)
        if isinstance(value, int) and value > max_value:
            return f"its {key} must be at most {max_value:,}, not {value:,}"
    scaling = header.architecture_value("rope.scaling.type", "none")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        return f"its rope.scaling.type is {shorten(scaling)!r}, which llama.cpp does not support"
    inner, size = header.architecture_value("ssm.inner_size"), header.architecture_value("embedding_length")
    has_sizes = isinstance(inner, int) and isinstance(size, int)
    if header.architecture in _DOUBLE_WIDTH_SSM and has_sizes and inner != 2 * size:
        return f"its ssm.inner_size is {inner:,}, not twice its embedding_length"
    return ""


def _template_problem(header: GgufHeader) -> str:
    template = header.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str) or "\0" not in template.rstrip("\0"):
        return ""
    return (
        f"its chat template of {len(template):,} characters contains a null character at position"
        f" {template.index(chr(0)) + 1:,}, and llama.cpp would ignore the rest"
    )


def _expert_problem(header: GgufHeader) -> str:
    experts, used = _largest(header, "expert_count"), _largest(header, "expert_used_count")
    groups, groups_used = _largest(header, "expert_group_count"), _largest(header, "expert_group_used_count")
    if experts <= 1 and header.architecture in _SINGLE_EXPERT_IGNORED:
        return ""
    if experts > _MAX_EXPERTS or used > experts or (experts and not used):
        return f"it claims to use {used:,} of {experts:,} experts"
    if (groups and groups >= experts) or (groups > 1 and (experts % groups or not 0 < groups_used < groups)):
        return f"it claims to use {groups_used:,} of {groups:,} groups of {experts:,} experts"
    if header.architecture and not experts and any("_exps." in tensor.name for tensor in header.tensors):
        return "it has experts, but no expert_count"
    return ""


def _compression_problem(header: GgufHeader) -> str:
    """Check the sizes in a DeepSeek-V4 header that llama.cpp does not check against the tensor shapes."""
    if header.architecture != _COMPRESSED_ARCHITECTURE:
        return ""
    heads, groups = (_largest(header, f"attention.{key}") for key in ("head_count", "output_group_count"))
    if not groups or heads % groups:
        return f"its {heads:,} attention heads cannot be divided into {groups:,} groups"
    if (of_keys := _largest(header, "attention.head_count_kv")) != 1:
        return f"it has {of_keys:,} key heads instead of 1"
    key, value = (_largest(header, f"attention.{key}_length") for key in ("key", "value"))
    if key != value:
        return f"its keys have size {key:,}, but its values have size {value:,}"
    indexed, rotated = (
        _largest(header, key) for key in ("attention.indexer.key_length", "rope.dimension_count")
    )
    if rotated > min(key or rotated, indexed):
        return f"its indexer's keys have {indexed:,} values, of which {rotated:,} are rotated"
    ratios = header.architecture_value("attention.compress_ratios", ())
    if isinstance(ratios, np.ndarray) and len(ratios) > _MAX_LAYERS:
        return f"it has compression ratios for {len(ratios):,} layers, more than the maximum of {_MAX_LAYERS}"
    return ""


def _largest(header: GgufHeader, key: str) -> int:
    value: Any = header.architecture_value(key, 0)
    if isinstance(value, np.ndarray):
        return int(value.max()) if value.size and value.dtype.kind in "iub" else 0
    return value if isinstance(value, int) else 0


def _epsilon_problem(header: GgufHeader) -> str:
    for key in _EPSILONS:
        epsilon = header.architecture_value(key)
        if isinstance(epsilon, float) and not 0 <= epsilon < math.inf:
            return f"its {key} must be a non-negative finite number, not {epsilon}"
    return ""


def _vocabulary_problem(header: GgufHeader) -> str:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        return ""
    if duplicates := _duplicate_count(tokens):
        return f"its vocabulary has {duplicates:,} duplicate tokens"
    model = header.metadata.get("tokenizer.ggml.model")
    if isinstance(model, str) and model == "llama":
        # Require a token for every byte, because llama.cpp aborts if it cannot spell a character with byte
        # tokens.
        byte_tokens = {name: byte for byte in range(256) for name in (b"<0x%02X>" % byte, bytes([byte]))}
        bytes_present = {byte_tokens[name] for name in _token_texts(tokens) if name in byte_tokens}
        if missing := 256 - len(bytes_present):
            return f"its vocabulary has no token for {missing:,} of the 256 bytes"
    return ""


def _token_texts(tokens: StringArray) -> Iterator[bytes]:
    """Yield the non-empty tokens as llama.cpp reads them, truncated at the first NUL byte."""
    return (text for token in tokens if (text := token.partition(b"\0")[0]))


def _duplicate_count(tokens: StringArray) -> int:
    # Look for duplicate hashes first, because a set of all tokens would take much more memory.
    hashes = np.sort(np.fromiter(map(hash, _token_texts(tokens)), np.int64))
    if not (hashes[1:] == hashes[:-1]).any():
        return 0
    texts = list(_token_texts(tokens))
    return len(texts) - len(set(texts))


def _tensor_problem(header: GgufHeader) -> str:
    for tensor in header.tensors:
        if tensor.kind in _NOT_WEIGHT_TYPES and not tensor.name.endswith(_TABLES):
            return (
                f"its tensor {shorten(tensor.name)} has type {_NOT_WEIGHT_TYPES[tensor.kind]}, which is not"
                " a type for weights"
            )
        small = len(tensor.shape) == 1 and tensor.name.endswith(("norm.weight", ".bias"))
        if tensor.kind != _F32 and (small or tensor.name.endswith(_ALWAYS_F32)):
            return f"its tensor {shorten(tensor.name)} must have type F32"
    if header.tensors:
        begin = header.size_bytes + min(tensor.offset_bytes for tensor in header.tensors)
        if begin % _ALIGNMENT_BYTES:
            return f"its weights begin at byte {begin:,}, not at a multiple of {_ALIGNMENT_BYTES}"
    return ""
