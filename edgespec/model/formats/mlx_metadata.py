"""Read the metadata of MLX models from their configuration and file headers, without loading weights."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.model.formats.mlx_files import (
    head_weights,
    is_complete_without_config,
    read_json_object,
    weight_files,
)
from edgespec.model.heads.eagle_files import eagle_kind
from edgespec.model.heads.mtp_files import mtp_files
from edgespec.model.heads.tensor_files import TensorHeader, read_folder_tensors, read_tensors
from edgespec.model.model_facts import ModelInfo, ModelKind
from edgespec.model.token_list import tokens_of_folder
from edgespec.options.methods import head_kinds
from edgespec.options.reply_options import stated_sampling
from edgespec.system.files import reading_model_files, regular_file_bytes

# Suffixes of the architecture names of models that generate text.
_TEXT_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
# Heads that only llama.cpp can run.
_OTHER_HEADS = {"gemma4assistant": "Gemma 4 assistant"}
# Kinds of heads whose version can be determined only from the tensors.
_ANY_EAGLE = {("EAGLE",), ("EAGLE-2",)}
# Settings in which a head lists the target layers whose hidden states it reads.
_READ_LAYERS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
# Keys of nested configurations, which hold the settings of a vision model's language model or of a head.
_INNER_CONFIGS = ("text_config", "transformer_layer_config", "eagle_config", "dflash_config")
# Maximum number of target layers that a head may read. Longer lists are ignored.
_MAX_READ_LAYERS = 64
# Matches the names of tensors that only multi-token prediction layers have.
_MTP_NAME = re.compile(r"(?:^|\.)(?:(?:mtp|nextn|mtp_layers\.\d+)\.|eh_proj\.weight$)")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
_CONTEXT = (
    "max_position_embeddings",
    "model_max_length",
    "n_positions",
    "seq_length",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
)
_LICENCE = re.compile(r"^license:\s*[\"']?([\w .+-]+?)[\"']?\s*$", re.MULTILINE)


def read_mlx_info(folder: Path) -> ModelInfo:
    """Return the metadata of an MLX model. Raises ModelFileError if the folder is not a complete model."""
    whole = read_json_object(folder / "config.json")
    config = language_config(whole)
    files = weight_files(folder)
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        tensors |= read_tensors(file)
    if not tensors:
        raise ModelFileError(
            f"{folder} contains no weights", "download the model again", code="model_file_incomplete"
        )
    tokens = tokens_of_folder(folder)
    experts, used = _first(config, _EXPERTS), _first(config, _EXPERTS_USED)
    settings = config.get("quantization") or whole.get("quantization")
    return ModelInfo(
        kind="head" if eagle_kind(tensors) else _kind(whole),
        family=_name(whole, folder),
        architecture=str(whole.get("model_type", "")),
        parameters=_parameters(tensors, settings if isinstance(settings, dict) else {}),
        quantisation=_quantisation(whole, settings, tensors),
        size_bytes=sum(file.stat().st_size for file in files),
        pass_bytes=_pass_bytes(tensors, used / experts if experts and used else 1.0),
        kv_bytes=_kv_bytes(config),
        context_tokens=trained_context(whole),
        vocab_size=_first(config, ("vocab_size",)) or (len(tokens.tokens) if tokens else 0),
        vocabulary=tokens.digest() if tokens else "",
        chat_template=_has_template(folder),
        licence=_licence(folder),
        experts=experts,
        experts_used=used,
        heads=tuple(
            _heads(whole, config, tensors | _extra_layers(folder)) or filter(None, [eagle_kind(tensors)])
        ),
        hidden_size=_first(config, ("target_hidden_size", "hidden_size", "n_embd")),
        layers=_first(config, ("num_hidden_layers", "n_layer")),
        read_layers=_read_layers(config),
        sampling=_sampling(folder),
    )


def read_head_info(folder: Path) -> ModelInfo:
    """Return the metadata of a head in the Hugging Face layout.

    Reads the head's configuration and file names. If they do not identify the kind of head, as for EAGLE-1,
    the tensor names are read as well. The result's `kind` is `model` if the files do not belong to a head.

    Raises:
        ModelFileError: The files are missing or damaged.
    """
    with reading_model_files(folder):
        names = [file.name for file in folder.iterdir() if file.is_file()]
        weights = head_weights(names)
        size_bytes = sum((folder / name).stat().st_size for name in weights)
    needs_config = "config.json" in names or not is_complete_without_config(weights)
    whole = read_json_object(folder / "config.json") if needs_config else {}
    config = language_config(whole)
    # The weights of Medusa and Hydra heads are in files such as `medusa_lm_head.safetensors`.
    named = [kind for name, kind in _head_names().items() for file in weights if file.startswith(f"{name}_")]
    heads = tuple(_heads(whole, config, {}) or named[:1])
    if (not heads or heads in _ANY_EAGLE) and (kind := eagle_kind(read_folder_tensors(folder))):
        heads = (kind,)
    return ModelInfo(
        kind="head" if heads else _kind(whole),
        family=_name(whole, folder),
        architecture=str(whole.get("model_type", "")),
        parameters=0,
        quantisation=str(config.get("torch_dtype") or config.get("dtype") or ""),
        size_bytes=size_bytes,
        pass_bytes=size_bytes,
        kv_bytes=_kv_bytes(config),
        context_tokens=trained_context(whole),
        vocab_size=_first(config, ("vocab_size",)),
        vocabulary="",
        chat_template=False,
        licence=_licence(folder),
        heads=heads,
        hidden_size=_first(config, ("target_hidden_size", "hidden_size", "n_embd")),
        layers=_first(config, ("num_hidden_layers", "n_layer")),
        read_layers=_read_layers(config),
        draft_vocab_size=_first(whole, ("draft_vocab_size",)),
    )


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's configuration, moving nested settings of vision models and heads to the top level."""
    inner = (config.get(name) for name in _INNER_CONFIGS)
    return dict(ChainMap(*(each for each in inner if isinstance(each, dict)), dict(config)))


def trained_context(config: Mapping[str, Any]) -> int:
    """Return the context length in tokens that a model was trained for, or 0 if unknown."""
    return _first(language_config(config), _CONTEXT)


def _kind(config: Mapping[str, Any]) -> ModelKind:
    named = _architectures(config)
    if not isinstance(config.get("model_type"), str):
        return "other"
    if not named:
        return "model"  # mlx-lm can load models that do not name their architecture.
    if any(head in name.lower() for name in named for head in _head_names()):
        return "head"
    return "model" if any(name.endswith(_TEXT_SUFFIXES) for name in named) else "embedding"


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    # Heads made with the speculators library specify their kind in a separate setting.
    return [*names, str(config["speculators_model_type"])] if "speculators_model_type" in config else names


def _head_names() -> dict[str, str]:
    """Map each name that can occur in a head's architecture or file name to the kind of head."""
    return {name: kind for name, (kind, _) in head_kinds().items()} | _OTHER_HEADS


def _heads(
    whole: Mapping[str, Any], config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> list[str]:
    for name in _architectures(whole):
        for head, kind in _head_names().items():
            if head in name.lower():
                return [kind]
    layers = _first(config, ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if any(_MTP_NAME.search(name) for name in tensors):
        return [f"MTP, {layers} layer{'s' if layers > 1 else ''}" if layers else "MTP"]
    return []


def _extra_layers(folder: Path) -> dict[str, TensorHeader]:
    """Return the tensors of multi-token prediction layers that are stored in separate files."""
    return {name: one for file in mtp_files(folder) for name, one in read_tensors(file).items()}


def _read_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    for layers in map(config.get, _READ_LAYERS):
        if isinstance(layers, list) and len(layers) <= _MAX_READ_LAYERS:
            return tuple(layer for layer in layers if type(layer) is int)
    return ()


def _parameters(tensors: Mapping[str, TensorHeader], settings: Mapping[str, Any]) -> int:
    """Return the number of weights. An element of a packed tensor holds several quantised weights."""
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


def _quantisation(whole: Mapping[str, Any], settings: Any, tensors: Mapping[str, TensorHeader]) -> str:
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


def _pass_bytes(tensors: Mapping[str, TensorHeader], used_fraction: float) -> int:
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
    """Return the first setting in `names` that is a positive integer below 2**40, or 0 if there is none."""
    values = (config.get(name) for name in names)
    plausible = (v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 40)
    return next(plausible, 0)


def _name(config: Mapping[str, Any], folder: Path) -> str:
    stated = config.get("_name_or_path")
    # In the Hugging Face cache, the folder is named after a commit, so use the repository's name.
    named = folder.parent.parent.name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name
    return stated.rstrip("/").rpartition("/")[2] if isinstance(stated, str) and stated.strip("/ ") else named


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    with suppress(ModelFileError):
        return bool(read_json_object(folder / "tokenizer_config.json").get("chat_template"))
    return False


def _sampling(folder: Path) -> dict[str, float]:
    """Return the sampling settings in generation_config.json, or {} if the file cannot be read."""
    # Ignore a damaged file here. Loading the model reports it, because the file also lists the end tokens.
    with suppress(ModelFileError):
        return stated_sampling(read_json_object(folder / "generation_config.json"))
    return {}


def _licence(folder: Path) -> str:
    """Return the licence stated in the front matter of README.md, or an empty string."""
    try:
        readme = folder / "README.md"
        regular_file_bytes(readme)
        with readme.open(encoding="utf-8-sig", errors="replace") as file:
            head = file.read(8192)
    except OSError:
        return ""
    match = _LICENCE.search(head.partition("\n---")[0]) if head.startswith("---") else None
    return match[1] if match else ""
