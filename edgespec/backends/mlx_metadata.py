"""Read the metadata of MLX models from their configuration and file headers, without loading weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.mlx_files import WEIGHTS
from edgespec.backends.model_info import Kind, ModelInfo
from edgespec.backends.token_list import tokens_of_folder
from edgespec.errors import ModelFileError

__all__ = ["read_mlx_info"]

# Maximum size of a safetensors header, as in the safetensors library.
_MAX_HEADER_BYTES = 100 * 2**20
# Suffixes of the architecture classes of models that generate text.
_TEXT_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_HEAD_NAMES = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "medusa": "Medusa", "hydra": "Hydra"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
_CONTEXT = ("max_position_embeddings", "model_max_length", "n_positions", "seq_length", "max_seq_len")
_LICENCE = re.compile(r"^license:\s*[\"']?([\w .+-]+?)[\"']?\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


def read_mlx_info(folder: Path) -> ModelInfo:
    """Return the metadata of an MLX model. Raises ModelFileError if the folder is not a complete model."""
    whole = _object(folder / "config.json")
    # Vision models store the configuration of their language model here.
    inner = whole.get("text_config")
    config = whole | inner if isinstance(inner, dict) else whole
    files = sorted(folder.glob(WEIGHTS))
    tensors: dict[str, _Tensor] = {}
    for file in files:
        tensors |= _tensors(file)
    if not tensors:
        raise ModelFileError(f"{folder} contains no weights", "download the model again")
    tokens = tokens_of_folder(folder)
    experts, used = _first(config, _EXPERTS), _first(config, _EXPERTS_USED)
    settings = config.get("quantization") or whole.get("quantization")
    return ModelInfo(
        kind=_kind(whole),
        family=_name(whole, folder),
        architecture=str(whole.get("model_type", "")),
        parameters=_parameters(tensors, settings if isinstance(settings, dict) else {}),
        quantisation=_quantisation(whole, settings, tensors),
        size_bytes=sum(file.stat().st_size for file in files),
        pass_bytes=_pass_bytes(tensors, used / experts if experts and used else 1.0),
        kv_bytes=_kv_bytes(config),
        context_tokens=_first(config, _CONTEXT),
        vocab_size=_first(config, ("vocab_size",)) or (len(tokens.tokens) if tokens else 0),
        vocabulary=tokens.digest() if tokens else "",
        chat_template=_has_template(folder),
        licence=_licence(folder),
        experts=experts,
        experts_used=used,
        heads=tuple(_heads(whole, config, tensors)),
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}", "download the model again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not contain a JSON object", "download the model again")
    return value


def _tensors(file: Path) -> dict[str, _Tensor]:
    """Return the tensors of a safetensors file by name, from its header."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        tensors, needed_bytes = {}, 0
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                needed_bytes = max(needed_bytes, 8 + length + end)
                shape = tuple(int(size) for size in entry["shape"])
                tensors[str(name)] = _Tensor(shape, str(entry["dtype"]), end - begin)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{file} is not a safetensors file: {error}", "download it again") from error
    if needed_bytes > size_bytes:
        raise ModelFileError(
            f"{file} is truncated: it has {size_bytes:,} of {needed_bytes:,} bytes", "download it again"
        )
    return tensors


def _kind(config: Mapping[str, Any]) -> Kind:
    named = _architectures(config)
    if not isinstance(config.get("model_type"), str):
        return "other"
    if not named:
        return "model"  # mlx-lm only reads `model_type`.
    if any(head in name.lower() for name in named for head in _HEAD_NAMES):
        return "head"
    return "model" if any(name.endswith(_TEXT_SUFFIXES) for name in named) else "embedding"


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def _heads(whole: Mapping[str, Any], config: Mapping[str, Any], tensors: Mapping[str, _Tensor]) -> list[str]:
    for name in _architectures(whole):
        for head, label in _HEAD_NAMES.items():
            if head in name.lower():
                return [label]
    layers = _first(config, ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if any(re.search(r"(?:^|\.)(?:mtp|nextn)\.", name) for name in tensors):
        return [f"MTP, {layers} layer{'s' if layers > 1 else ''}" if layers else "MTP"]
    return []


def _parameters(tensors: Mapping[str, _Tensor], settings: Mapping[str, Any]) -> int:
    """Return the number of weights. Several quantised weights share an element of a packed tensor."""
    total = 0
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        count = 1
        for size in tensor.shape:
            count *= size
        if name.endswith((".scales", ".biases")) and f"{module.rpartition('.')[0]}.weight" in tensors:
            continue
        if tensor.dtype == "U32" and f"{module}.scales" in tensors:
            own = settings.get(module)
            bits = (own if isinstance(own, dict) else settings).get("bits")
            count = count * 32 // bits if isinstance(bits, int) and bits > 0 else count
        total += count
    return total


def _quantisation(whole: Mapping[str, Any], settings: Any, tensors: Mapping[str, _Tensor]) -> str:
    if isinstance(settings, dict) and isinstance(settings.get("bits"), int):
        mode = settings.get("mode")
        return f"{settings['bits']}-bit" if mode in (None, "affine") else str(mode)
    other = whole.get("quantization_config")
    if isinstance(other, dict) and isinstance(other.get("quant_method"), str):
        return str(other["quant_method"])
    by_dtype: dict[str, int] = {}
    for tensor in tensors.values():
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.size_bytes
    return max(by_dtype, key=by_dtype.__getitem__)


def _pass_bytes(tensors: Mapping[str, _Tensor], used_fraction: float) -> int:
    has_head = any("lm_head." in name for name in tensors)
    return round(
        sum(
            tensor.size_bytes * (used_fraction if "switch_mlp." in name or ".experts." in name else 1.0)
            for name, tensor in tensors.items()
            if not (has_head and "embed_tokens." in name)
        )
    )


def _kv_bytes(config: Mapping[str, Any]) -> int:
    heads = _first(config, ("num_attention_heads", "n_head"))
    size = _first(config, ("head_dim",)) or (
        _first(config, ("hidden_size", "n_embd")) // heads if heads else 0
    )
    of_keys = _first(config, ("num_key_value_heads",)) or heads
    return _first(config, ("num_hidden_layers", "n_layer")) * of_keys * size * 2 * 2


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first of these settings that is a positive integer below 2**40, or 0."""
    values = (config.get(name) for name in names)
    plausible = (v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 40)
    return next(plausible, 0)


def _name(config: Mapping[str, Any], folder: Path) -> str:
    stated = config.get("_name_or_path")
    # In the Hugging Face cache the folder is named after a commit.
    named = folder.parent.parent.name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name
    return stated.rstrip("/").rpartition("/")[2] if isinstance(stated, str) and stated.strip("/ ") else named


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def _licence(folder: Path) -> str:
    """Return the licence named at the beginning of the README.md, or an empty string."""
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            head = file.read(8192)
    except OSError:
        return ""
    match = _LICENCE.search(head.partition("\n---")[0]) if head.startswith("---") else None
    return match[1] if match else ""
