"""What llama.cpp takes for granted in a file, and ends the process over: looked at before it may."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.gguf_files import gguf_files
from edgespec.backends.gguf_header import GgufHeader, Texts, read_header
from edgespec.errors import ModelFileError

__all__ = ["check_header"]

# LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS
_MOST_LAYERS = 512
_MOST_EXPERTS = 1024
# Sizes and counts that it divides by, or makes as much of as they say.
_COUNTS = {
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
# Models in which it leaves a single expert out of account.
_ONE_EXPERT_IS_NONE = ("hunyuan-dense", "hunyuan_vl")
# ggml's types that are no weights, by number: nothing multiplies by them, and a null function is called.
_NO_WEIGHTS = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_F32 = 0
_ALWAYS_F32 = (".ssm_a", ".ssm_d", ".ssm_conv1d.weight")
# Tables of numbers, not weights.
_TABLES = ("tid2eid",)
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Models whose recurrent layers have to be twice as wide as the others.
_TWICE_AS_WIDE = ("jamba", "granitehybrid")
# Mapped weights may begin at multiples of this only.
_ALIGNMENT_BYTES = 32


def check_header(path: Path) -> None:
    """Raises ModelFileError for a header that llama.cpp would abort on, and where there is no file.

    path: of a model in several files, its first; all are looked at.
    """
    for part in gguf_files(path):
        try:
            found = part.stat()
        except OSError as error:
            raise ModelFileError(
                f"{part} cannot be read: {error.strerror or error}", "check the path"
            ) from error
        _check(part, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=64)
def _check(path: Path, _size_bytes: int, _changed_ns: int) -> None:
    """Once for each file as it is: a header with a large vocabulary takes a while."""
    try:
        header = read_header(path)
    except ModelFileError:
        return  # llama.cpp says better what is wrong with what cannot be read at all
    wrong = (
        _wrong_count(header)
        or _wrong_experts(header)
        or _wrong_epsilon(header)
        or _wrong_vocabulary(header)
        or _wrong_tensor(header)
    )
    if wrong:
        raise ModelFileError(f"{path} is damaged: {wrong}", "download it again, or choose another model")


def _wrong_count(header: GgufHeader) -> str:
    layers = header.architecture_value("block_count")
    if isinstance(layers, int) and not 0 < layers <= _MOST_LAYERS:
        return f"it says it has {layers:,} layers"
    more = header.architecture_value("nextn_predict_layers", 0)
    if isinstance(layers, int) and isinstance(more, int) and more > layers:
        return f"it says that {more:,} of {layers:,} layers predict further tokens"
    for key, most in _COUNTS.items():
        said = header.architecture_value(key)
        if isinstance(said, int) and said > most:
            return f"its {key} is {said:,}"
    scaling = header.architecture_value("rope.scaling.type", "none")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        return f"its rope.scaling.type is {scaling[:40]!r}, which this llama.cpp does not know"
    inner, size = header.architecture_value("ssm.inner_size"), header.architecture_value("embedding_length")
    if header.architecture in _TWICE_AS_WIDE and isinstance(inner, int) and inner != 2 * size:
        return f"its ssm.inner_size is {inner:,}, and not twice its embedding_length"
    return ""


def _wrong_experts(header: GgufHeader) -> str:
    experts, used = _most(header, "expert_count"), _most(header, "expert_used_count")
    groups, groups_used = _most(header, "expert_group_count"), _most(header, "expert_group_used_count")
    if experts <= 1 and header.architecture in _ONE_EXPERT_IS_NONE:
        return ""
    if experts > _MOST_EXPERTS or used > experts or (experts and not used):
        return f"it says that {used:,} of its {experts:,} experts are used"
    if (groups and groups >= experts) or (groups > 1 and (experts % groups or not 0 < groups_used < groups)):
        return f"it says that {groups_used:,} of {groups:,} groups of its {experts:,} experts are used"
    if header.architecture and not experts and any("_exps." in tensor.name for tensor in header.tensors):
        return "it has experts, and does not say how many"
    return ""


def _most(header: GgufHeader, key: str) -> int:
    """A count, or the largest of those of all layers; 0 where none is said."""
    said: Any = header.architecture_value(key, 0)
    if isinstance(said, np.ndarray):
        return int(said.max()) if said.size and said.dtype.kind in "iub" else 0
    return said if isinstance(said, int) else 0


def _wrong_epsilon(header: GgufHeader) -> str:
    for key in _EPSILONS:
        said = header.architecture_value(key)
        if isinstance(said, float) and not 0 <= said < math.inf:
            return f"its {key} is {said}"
    return ""


def _wrong_vocabulary(header: GgufHeader) -> str:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Texts):
        return ""
    if twice := _there_twice(tokens):
        return f"{twice:,} tokens of its vocabulary are there twice"
    if header.metadata.get("tokenizer.ggml.model") == "llama":
        # A character that is no token is taken apart into bytes, and each of them has to be there.
        alone = {name: byte for byte in range(256) for name in (b"<0x%02X>" % byte, bytes([byte]))}
        there = {alone[name] for name in _named(tokens) if name in alone}
        if lost := 256 - len(there):
            return f"its vocabulary has no token for {lost:,} of the 256 bytes"
    return ""


def _named(tokens: Texts) -> Iterator[bytes]:
    """It reads them up to a zero, and gives names to those without one."""
    return (text for token in tokens if (text := token.partition(b"\0")[0]))


def _there_twice(tokens: Texts) -> int:
    # All at once they would take many times what their hashes do.
    hashes = np.sort(np.fromiter(map(hash, _named(tokens)), np.int64))
    if not (hashes[1:] == hashes[:-1]).any():
        return 0
    named = list(_named(tokens))
    return len(named) - len(set(named))


def _wrong_tensor(header: GgufHeader) -> str:
    for tensor in header.tensors:
        if tensor.kind in _NO_WEIGHTS and not tensor.name.endswith(_TABLES):
            return f"its {tensor.name[:80]} is of type {_NO_WEIGHTS[tensor.kind]}, which no weights have"
        small = len(tensor.shape) == 1 and tensor.name.endswith(("norm.weight", ".bias"))
        if tensor.kind != _F32 and (small or tensor.name.endswith(_ALWAYS_F32)):
            return f"its {tensor.name[:80]} is not of type F32, as such weights have to be"
    if header.tensors:
        begin = header.size_bytes + min(tensor.offset_bytes for tensor in header.tensors)
        if begin % _ALIGNMENT_BYTES:
            return f"its weights begin at byte {begin:,}, no multiple of {_ALIGNMENT_BYTES}"
    return ""
