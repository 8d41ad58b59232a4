"""Convert a published EAGLE-3 head from the Hugging Face layout to GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal
from numpy.typing import NDArray

from edgespec.errors import ModelFileError

__all__ = ["convert_eagle_head"]

# The tensors of a head in the layouts of SafeAILab, SpecForge and AngelSlim, and their names in GGUF. NVIDIA
# and speculators write `layers.0` instead of `midlayer`.
_TENSORS = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
_OPTIONAL = {"embed_tokens.weight", "lm_head.weight"}
# Not needed: the draft vocabulary as a mask over the target's.
_IGNORED = {"t2d"}
_DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32}


def convert_eagle_head(folder: Path, target_layers: int, output: Path) -> None:
    """Write a GGUF file with the head in a folder.

    Args:
        folder: Folder with `config.json` and `model.safetensors`.
        target_layers: Number of layers of the target. By default, a head reads its layers 2, n // 2 and
            n - 3.
        output: The file to write.

    Raises:
        ModelFileError: The folder contains no EAGLE-3 head, or one that cannot be converted.
        OSError: A file cannot be read or written.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = {**config, **config.get("transformer_layer_config", {})}
        tensors = SafetensorsLocal(folder / "model.safetensors").tensors
        arrays = _arrays(folder, tensors, _head_size(config), int(config["vocab_size"]))
        writer = gguf.GGUFWriter(output, "eagle3")
        _add_metadata(writer, config, target_layers)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ModelFileError(
            f"{folder} is not an EAGLE-3 head that edgespec can convert: {error}",
            "choose a folder with config.json and model.safetensors of an EAGLE-3 head",
        ) from error
    for name, data in arrays.items():
        writer.add_tensor(name, data)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _arrays(
    folder: Path, tensors: Mapping[str, LocalTensor], head_size: int, vocab_size: int
) -> dict[str, NDArray[Any]]:
    """Return the head's tensors by their names in GGUF: matrices in F16, and vectors in F32."""
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    missing = _TENSORS.keys() - _OPTIONAL - named.keys()
    unknown = named.keys() - _TENSORS.keys() - _IGNORED - {"d2t"}
    if missing or unknown:
        what = f"it lacks {min(missing)}" if missing else f"it contains {min(unknown)}"
        raise ModelFileError(
            f"{folder} is not an EAGLE-3 head that edgespec can convert: {what}",
            "choose a folder with config.json and model.safetensors of an EAGLE-3 head",
        )
    arrays = {}
    for name, tensor in named.items():
        if name in _TENSORS:
            data = _array(tensor)
            if data.dtype.kind != "f":
                raise ValueError(f"its {name} has the type {tensor.dtype}, which is no weight type")
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                data = _interleaved(data, head_size)
            arrays[_TENSORS[name]] = data.astype(np.float16 if data.ndim > 1 else np.float32)
    if "d2t" in named:
        # Published heads store the difference between a token's ids in the two vocabularies.
        offsets = _array(named["d2t"]).astype(np.int64)
        ids = arrays["d2t"] = np.arange(len(offsets), dtype=np.int64) + offsets
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"its d2t contains token ids outside the vocabulary of {vocab_size:,} tokens")
    return arrays


def _interleaved(weights: NDArray[Any], head_size: int) -> NDArray[Any]:
    """Reorder the rows of each attention head for llama.cpp, which rotates neighbours instead of halves."""
    heads = weights.reshape(-1, 2, head_size // 2, weights.shape[1])
    return heads.swapaxes(1, 2).reshape(weights.shape)


def _array(tensor: LocalTensor) -> NDArray[Any]:
    data = np.asarray(tensor.mmap_bytes())
    if tensor.dtype == "BF16":
        # BF16 is the upper half of F32.
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))


def _add_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any], target_layers: int) -> None:
    size, heads, head_size = (
        int(config["hidden_size"]),
        int(config["num_attention_heads"]),
        _head_size(config),
    )
    layers = config.get("eagle_aux_hidden_state_layer_ids") or [2, target_layers // 2, target_layers - 3]
    writer.add_block_count(1)
    writer.add_context_length(int(config.get("max_position_embeddings") or 0))
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_tokenizer_model("none")
    writer.add_array("eagle3.target_layers", [int(layer) for layer in layers])
    writer.add_uint32("eagle3.target_hidden_size", int(config.get("target_hidden_size") or size))
    writer.add_bool("eagle3.norm_before_residual", bool(config.get("norm_before_residual", False)))
    writer.add_bool("eagle3.norm_before_fc", bool(config.get("norm_before_fc", False)))
