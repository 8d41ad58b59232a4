"""Read the metadata of GGUF models from their file headers, without loading weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.model.formats.file_quirks import why_doubtful
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import GgufHeader, GgufTensor, read_header
from edgespec.model.formats.layerskip_files import FILES, LOWER_FIRST, UPPER_FIRST
from edgespec.model.model_facts import ModelInfo, ModelKind, OutputLayer, PassWeights
from edgespec.model.token_list import tokens_of_header
from edgespec.options.methods import head_kinds
from edgespec.options.reply_options import stated_sampling

# llama.cpp architectures that compute embeddings instead of generating text.
_EMBEDDING = (
    "bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert", "modern-bert",
    "t5encoder", "gemma-embedding", "eurobert",
)  # fmt: skip
# Maximum number of target layers that a head may read. Longer lists are ignored.
_MAX_READ_LAYERS = 64
_F16_BYTES = 2
# Prefix of the settings that llama.cpp's converter copies from the model's generation_config.json.
_SAMPLING = "general.sampling."
_MATRIX_DIMENSIONS = 2


def read_gguf_info(path: Path) -> ModelInfo:
    """Read the metadata of a GGUF model from all its parts. Raises ModelFileError if a file is invalid."""
    return _of_parts(gguf_files(path))


def read_pass_weights(path: Path) -> PassWeights:
    """Return the weights that a single-token pass reads. Raises ModelFileError if a file is invalid."""
    headers = {part: read_header(part) for part in gguf_files(path)}
    first = next(iter(headers.values()))
    sizes = {name: size for part, each in headers.items() for name, size in tensor_bytes(part, each)}
    names: dict[str, list[str]] = {}
    for each in headers.values():
        for tensor in each.tensors:
            names.setdefault(_type_name(tensor.kind), []).append(tensor.name)
    used_fraction = _used_fraction(first)
    has_head = "output.weight" in sizes
    bytes_of = {
        kind: _pass_bytes([(name, sizes[name]) for name in of_kind], used_fraction, has_head)
        for kind, of_kind in names.items()
    }
    output = next(
        (
            OutputLayer(_type_name(tensor.kind), sizes[tensor.name], *tensor.shape)
            for each in headers.values()
            for tensor in each.tensors
            if tensor.name == "output.weight" and len(tensor.shape) == _MATRIX_DIMENSIONS
        ),
        None,
    )
    return PassWeights(bytes_of, _number(first.architecture_value("block_count")), output)


def _type_name(number: int) -> str:
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return ""


def read_split_info(folder: Path) -> ModelInfo:
    """Return the metadata of a model prepared for early exit.

    The original file is not needed and may have been deleted.

    Raises:
        ModelFileError: A file is missing or damaged.
    """
    info = _of_parts([folder / name for name in FILES])
    # Each file describes only its own layers, so add up the KV cache sizes of the lower and the upper layers.
    kv_bytes = sum(_kv_bytes(read_header(folder / first)) for first in (LOWER_FIRST, UPPER_FIRST))
    return replace(info, kv_bytes=kv_bytes)


def _of_parts(parts: Sequence[Path]) -> ModelInfo:
    """Return the metadata of a multi-file model. The first file contains the general metadata."""
    headers = [read_header(part) for part in parts]
    header = headers[0]
    bytes_of = [pair for part, each in zip(parts, headers, strict=True) for pair in tensor_bytes(part, each)]
    tensors = [tensor for each in headers for tensor in each.tensors]
    metadata = header.metadata
    has_head = any(name == "output.weight" for name, _ in bytes_of)
    tokens = tokens_of_header(header)
    kind = _kind(header, tensors)
    vocab_size = len(tokens.tokens) if tokens else _number(header.architecture_value("vocab_size"))
    return ModelInfo(
        kind=kind,
        family=_text(metadata.get("general.basename"))
        or _text(metadata.get("general.name"))
        or header.architecture,
        architecture=header.architecture,
        parameters=sum(tensor.elements for tensor in tensors),
        quantisation=_quantisation(metadata, tensors),
        size_bytes=sum(part.stat().st_size for part in parts),
        pass_bytes=_pass_bytes(bytes_of, _used_fraction(header), has_head),
        kv_bytes=_kv_bytes(header),
        context_tokens=_number(header.architecture_value("context_length")),
        vocab_size=vocab_size,
        vocabulary=tokens.digest() if tokens else "",
        chat_template=bool(_text(metadata.get("tokenizer.chat_template"))),
        licence=_text(metadata.get("general.license")),
        experts=_number(header.architecture_value("expert_count")),
        experts_used=_number(header.architecture_value("expert_used_count")),
        heads=tuple(_heads(header, tensors)),
        hidden_size=_hidden_size(header),
        layers=_number(header.architecture_value("block_count")),
        read_layers=_read_layers(header),
        draft_vocab_size=next((tensor.elements for tensor in tensors if tensor.name == "d2t"), vocab_size)
        if kind == "head"
        else 0,
        sampling=_sampling(metadata) if kind == "model" else {},
        doubt=why_doubtful(headers) if kind == "model" else "",
    )


def _sampling(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the recommended sampling settings, such as `general.sampling.temp`."""
    stated = {
        # A float32 only approximates a value such as 0.95, so convert it to the shortest decimal number that
        # rounds to the same float32.
        key.removeprefix(_SAMPLING): float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in metadata.items()
        if key.startswith(_SAMPLING)
    }
    return stated_sampling(stated)


def _kind(header: GgufHeader, tensors: Sequence[GgufTensor]) -> ModelKind:
    kind = _text(header.metadata.get("general.type"))
    if header.architecture == "clip" or kind == "mmproj":
        return "projector"
    if kind == "adapter":
        return "adapter"
    if header.architecture in _EMBEDDING:
        return "embedding"
    # A file that contains only MTP layers has its target's architecture, but lacks the target's first layer.
    has_first_layer = any(tensor.name.startswith("blk.0.") for tensor in tensors)
    if header.architecture in head_kinds() or (_heads(header, tensors) and not has_first_layer):
        return "head"
    return "model" if header.architecture and header.architecture_number("block_count") else "other"


def _heads(header: GgufHeader, tensors: Sequence[GgufTensor]) -> list[str]:
    if header.architecture in (kinds := head_kinds()):
        return [kinds[header.architecture][0]]
    layers = _number(header.architecture_value("nextn_predict_layers"))
    # Some converters remove the tensors of MTP layers but keep the layer count in the metadata.
    present = any(".nextn." in tensor.name for tensor in tensors)
    return [f"MTP, {layers} layer{'s' if layers > 1 else ''}"] if layers and present else []


def _hidden_size(header: GgufHeader) -> int:
    """Return a model's hidden size, or the size of the target's hidden states that a head reads."""
    # `embedding_length_out` works for Gemma 4 assistants, whose output hidden states have the target's hidden
    # size.
    of_target = ("target_hidden_size", "embedding_length_out") if header.architecture in head_kinds() else ()
    sizes = (header.architecture_number(key) for key in (*of_target, "embedding_length"))
    return next(filter(None, sizes), 0)


def _read_layers(header: GgufHeader) -> tuple[int, ...]:
    layers = header.architecture_value("target_layers")
    if isinstance(layers, np.ndarray) and layers.dtype.kind in "iu" and len(layers) <= _MAX_READ_LAYERS:
        return tuple(int(layer) for layer in layers)
    return ()


def tensor_bytes(file: Path, header: GgufHeader) -> list[tuple[str, int]]:
    """Return the name and size of each tensor in a GGUF file, including the padding after it.

    Raises:
        ModelFileError: The file is truncated.
    """
    file_bytes = file.stat().st_size
    ordered = sorted(header.tensors, key=lambda tensor: tensor.offset_bytes)
    ends = [*(tensor.offset_bytes for tensor in ordered[1:]), file_bytes - header.size_bytes]
    sizes = [(tensor.name, end - tensor.offset_bytes) for tensor, end in zip(ordered, ends, strict=False)]
    if any(size_bytes <= 0 for _, size_bytes in sizes):
        raise ModelFileError(
            f"{file} is truncated: its tensors extend beyond its {file_bytes:,} bytes", "download it again"
        )
    return sizes


def _used_fraction(header: GgufHeader) -> float:
    """Return the fraction of experts that process each token, or 1 for a model without experts."""
    experts = _number(header.architecture_value("expert_count"))
    used = _number(header.architecture_value("expert_used_count"))
    return used / experts if experts and used else 1.0


def _pass_bytes(bytes_of: Sequence[tuple[str, int]], used_fraction: float, has_head: bool) -> int:
    # A pass reads only a few rows of the embedding table, unless the table is also the output layer.
    looked_up = {"token_embd.weight"} if has_head else set()
    return round(
        sum(
            size_bytes * (used_fraction if "_exps." in name else 1.0)
            for name, size_bytes in bytes_of
            if name not in looked_up and not name.startswith("per_layer_token_embd")
        )
    )


def _kv_bytes(header: GgufHeader) -> int:
    layers = _number(header.architecture_value("block_count"))
    heads = header.architecture_value("attention.head_count")
    first_head = _number(heads[0] if isinstance(heads, np.ndarray) and len(heads) else heads)
    of_keys = header.architecture_value("attention.head_count_kv", heads)
    if isinstance(of_keys, np.ndarray):
        all_heads = int(of_keys.sum()) if of_keys.dtype.kind in "iu" else 0
    else:
        all_heads = _number(of_keys) * layers
    size = _number(header.architecture_value("embedding_length")) // first_head if first_head else 0
    key = _number(header.architecture_value("attention.key_length")) or size
    value = _number(header.architecture_value("attention.value_length")) or size
    return all_heads * (key + value) * _F16_BYTES


def _quantisation(metadata: Mapping[str, Any], tensors: list[GgufTensor]) -> str:
    """Return the quantisation named in the metadata, or else the type of most weights."""
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    if name := file_type_name(metadata.get("general.file_type")):
        return name
    weights: dict[int, int] = {}
    for tensor in tensors:
        weights[tensor.kind] = weights.get(tensor.kind, 0) + tensor.elements
    try:
        return str(gguf.GGMLQuantizationType(max(weights, key=weights.__getitem__)).name)
    except ValueError:
        return ""


def file_type_name(file_type: Any) -> str:
    """Return the name of a llama.cpp file type, such as `Q4_K_M`, or an empty string if it is unknown."""
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    try:
        return gguf.LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (ValueError, TypeError):
        return ""


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | np.integer) and value > 0 else 0


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""
