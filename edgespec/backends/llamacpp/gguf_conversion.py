"""Convert draft models and published EAGLE-3, DFlash and DSpark heads to GGUF."""

from __future__ import annotations

import re
import shlex
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, shorten
from edgespec.model.heads.dflash_files import DFlashConfig, read_dflash
from edgespec.model.heads.eagle_files import EagleConfig, EagleFiles, read_eagle
from edgespec.model.heads.layer_config import LayerConfig, layer_settings, read_config
from edgespec.model.heads.numpy_layers import ROPE_KINDS, RopeSettings, llama3_divisors
from edgespec.model.heads.tensor_files import StoredTensor, read_folder_tensors
from edgespec.system.disks import explain_write_errors

__all__ = ["convert_dflash_head", "convert_draft_model", "convert_eagle_head"]

# Maps canonical tensor names (see `edgespec.model.heads.eagle_files`) to GGUF names.
_EAGLE_NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "layer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
# Name suffixes of matrices whose outputs are rotated by RoPE.
_ROTATED = ("q_proj.weight", "k_proj.weight")
# Number of target hidden states that llama.cpp's EAGLE-3 implementation reads.
_STATES = 3
# Maps published tensor names to GGUF names. Names of layer tensors are prefixed with `blk.<layer>.`.
_DFLASH_NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DFLASH_NAME = re.compile(r"(?:layers\.(\d+)\.)?(.*)\.weight")
# Architectures that can be converted, keyed by `model_type` in config.json.
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
# The bits per weight that MLX's quantisation supports.
_BITS = (2, 3, 4, 5, 6, 8)
# Maximum number of bits to unpack at once from a quantised matrix. This limits the memory used for unpacking.
_UNPACKED_BITS = 2**26


def convert_eagle_head(folder: Path, target_layers: int, output: Path) -> None:
    """Convert the EAGLE-3 head in a folder to a GGUF file.

    Args:
        folder: Folder with the head's `config.json` and weights.
        target_layers: Number of layers in the target.
        output: The GGUF file to write.

    Raises:
        ModelFileError: The folder contains no EAGLE-3 head, or llama.cpp does not support the head.
        OSError: A file cannot be read or written.
    """
    head = read_eagle(folder)
    layers = _eagle_layers(folder, head, target_layers)
    tensors = (
        (_EAGLE_NAMES[name], _eagle_values(name, tensor, head.config))
        for name, tensor in head.tensors.items()
    )
    add_settings = partial(_add_eagle_settings, config=head.config, layers=layers)
    _write_converted(
        output, "eagle3", f"the draft head in {folder}", head.config, tensors, head.target_ids, add_settings
    )


def _eagle_values(name: str, tensor: StoredTensor, config: EagleConfig) -> NDArray[Any]:
    """Return a tensor's values in the order that llama.cpp expects."""
    values = tensor.read()
    return _interleaved(values, config.head_size) if name.endswith(_ROTATED) else values


def _eagle_layers(folder: Path, head: EagleFiles, target_layers: int) -> tuple[int, ...]:
    """Return the indices of the target layers whose inputs the head reads, if llama.cpp supports the head."""
    config, choices = head.config, head.config.layer_choices(target_layers)
    unknown = sorted(head.tensors.keys() - _EAGLE_NAMES.keys())
    if config.version != 3:
        raise ModelFileError(
            f"the draft head in {folder} needs no conversion, because it is an EAGLE-1 or EAGLE-2 head",
            f"use the folder itself: --head {shlex.quote(str(folder))}",
            code="wrong_file",
        )
    if unknown:
        problem = f"llama.cpp does not support the tensor {unknown[0]}"
    elif config.norm_output or config.rope.kind not in ROPE_KINDS:
        rope = f"rope_scaling of type {shorten(config.rope.kind)!r}"
        problem = f"llama.cpp does not support {'norm_output' if config.norm_output else rope}"
    elif not choices or len(choices[0]) != _STATES or max(choices[0]) >= target_layers:
        problem = f"it reads the layers {list(config.layers or ())}, but the model has {target_layers} layers"
    else:
        return choices[0]
    raise ModelFileError(
        f"the draft head in {folder} cannot be converted: {problem}",
        "choose an EAGLE-3 head for this model",
        code="model_file_not_supported",
    )


def _add_eagle_settings(writer: gguf.GGUFWriter, config: EagleConfig, layers: tuple[int, ...]) -> None:
    writer.add_tokenizer_model("none")
    writer.add_block_count(1)
    writer.add_embedding_length(config.hidden_size)
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", config.target_size)
    writer.add_bool("eagle3.norm_before_residual", config.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", config.norm_before_fc)


def convert_dflash_head(folder: Path, target_layers: int, output: Path) -> None:
    """Convert the DFlash or DSpark head in a folder to a GGUF file.

    Args:
        folder: Folder with the head's `config.json` and weights.
        target_layers: Number of layers in the target.
        output: The GGUF file to write.

    Raises:
        ModelFileError: The folder contains no DFlash or DSpark head, or the head does not fit the target.
        OSError: A file cannot be read or written.
    """
    head = read_dflash(folder)
    if problem := _dflash_problem(head.config, target_layers):
        raise ModelFileError(
            f"the draft head in {folder} cannot be converted: {problem}",
            "choose a DFlash or DSpark head for this model",
            code="model_file_not_supported",
        )
    tensors = ((_dflash_name(name), tensor.read()) for name, tensor in head.tensors.items())
    add_settings = partial(_add_dflash_settings, config=head.config)
    _write_converted(
        output, "dflash", f"the draft head in {folder}", head.config, tensors, head.target_ids, add_settings
    )


def _dflash_problem(config: DFlashConfig, target_layers: int) -> str:
    if not config.states or not all(0 <= state <= target_layers for state in config.states):
        return f"it reads the layers {list(config.states)}, but the model has {target_layers} layers"
    if config.rope.kind not in ROPE_KINDS:
        return f"llama.cpp does not support rope_scaling of type {shorten(config.rope.kind)!r}"
    if len({*config.windows} - {0}) > 1:
        return "its layers have sliding windows of different sizes"
    return ""


def _dflash_name(name: str) -> str:
    match = _DFLASH_NAME.fullmatch(name)
    assert match is not None
    layer, part = match.groups()
    return f"{'' if layer is None else f'blk.{layer}.'}{_DFLASH_NAMES[part]}.weight"


def _add_dflash_settings(writer: gguf.GGUFWriter, config: DFlashConfig) -> None:
    writer.add_tokenizer_model("none")
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.size)
    writer.add_mask_token_id(config.mask_token)
    writer.add_causal_attention(config.is_causal)
    if any(config.windows):
        writer.add_sliding_window(max(config.windows))
        writer.add_sliding_window_pattern([window > 0 for window in config.windows])
    writer.add_array("dflash.target_layers", list(config.states))
    writer.add_uint32("dflash.block_size", config.block_tokens)
    writer.add_bool("dflash.sample_from_anchor", config.predicts_next)


def convert_draft_model(folder: Path, tokenizer: Mapping[str, tuple[Any, Any, Any]], output: Path) -> None:
    """Convert the model in a folder to a GGUF file with float16 matrices.

    Args:
        folder: Folder with `config.json` and the weights, which may be quantised by MLX.
        tokenizer: The tokenizer metadata from the target's GGUF file: (value, type, element type) by key.
        output: The GGUF file to write.

    Raises:
        ModelFileError: The model is damaged, or its architecture cannot be converted.
        OSError: A file cannot be read or written.
    """
    settings, stored = read_config(folder), read_folder_tensors(folder)
    try:
        config = LayerConfig(**layer_settings(settings))
        layers, size = int(settings["num_hidden_layers"]), int(settings["hidden_size"])
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise _unusable(folder, f"the settings in config.json are invalid: {shorten(error)}") from error
    if problem := _draft_problem(settings, config, stored):
        raise _unusable(folder, problem)
    kind = _ARCHITECTURES[settings["model_type"]]
    names = gguf.get_tensor_name_map(kind, layers)
    tensors = _draft_tensors(folder, stored, settings, config, names)

    def add_settings(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(layers)
        writer.add_embedding_length(size)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        for key, (value, value_type, element) in tokenizer.items():
            writer.add_key_value(key, value, value_type, sub_type=element)

    _write_converted(
        output, gguf.MODEL_ARCH_NAMES[kind], f"the model in {folder}", config, tensors, None, add_settings
    )


def _unusable(folder: Path, problem: str) -> ModelFileError:
    return ModelFileError(
        f"the model in {folder} cannot be converted: {problem}",
        "pass the folder itself to --draft, or convert it with llama.cpp's convert_hf_to_gguf.py",
        code="model_file_not_supported",
    )


def _draft_problem(
    settings: Mapping[str, Any], config: LayerConfig, stored: Mapping[str, StoredTensor]
) -> str:
    kind, biases = settings.get("model_type"), {name for name in stored if name.endswith(".bias")}
    if kind not in _ARCHITECTURES:
        return f"the architecture is {shorten(kind)!r}, not one of {', '.join(_ARCHITECTURES)}"
    if config.rope.kind not in ROPE_KINDS:
        return f"llama.cpp does not support rope_scaling of type {shorten(config.rope.kind)!r}"
    if kind == "llama" and biases:
        return f"llama.cpp does not support the bias {min(biases)} in Llama models"
    if settings.get("use_sliding_window") or "sliding_attention" in (settings.get("layer_types") or ()):
        return "layers with a sliding window are not supported"
    return ""


def _draft_tensors(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    settings: Mapping[str, Any],
    config: LayerConfig,
    names: gguf.TensorNameMap,
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield each tensor's GGUF name and values."""
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases") or name.endswith("rotary_emb.inv_freq"):
            continue
        new = names.get_name(name, (".weight", ".bias"))
        if new is None:
            raise _unusable(folder, f"llama.cpp does not recognise the tensor {name}")
        quantised = part == "weight" and f"{module}.scales" in stored
        values = _dequantised(folder, module, stored, settings) if quantised else tensor.read()
        if settings["model_type"] == "llama" and name.endswith(_ROTATED):
            values = _interleaved(values, config.head_size)
        yield new, values


def _dequantised(
    folder: Path, module: str, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Return the dequantised weights [rows, columns] of a matrix that MLX quantised.

    Each packed row is a little-endian bit stream of fixed-width integers. Each group of columns has a scale
    and a bias.
    """
    packed, scales = stored[f"{module}.weight"].read(), stored[f"{module}.scales"].read()
    quantisation = settings.get("quantization")
    own = quantisation.get(module, quantisation) if isinstance(quantisation, dict) else {}
    bits = own.get("bits")
    if packed.dtype != np.uint32 or bits not in _BITS or f"{module}.biases" not in stored:
        raise _unusable(folder, f"the quantisation of {module} is unknown")
    biases, powers = stored[f"{module}.biases"].read(), 1 << np.arange(bits)
    weights = np.empty((len(packed), packed.shape[1] * 32 // bits), np.float32)
    rows = max(1, _UNPACKED_BITS // (32 * packed.shape[1]))
    for begin in range(0, len(packed), rows):
        chosen = slice(begin, begin + rows)
        stream = np.unpackbits(packed[chosen].view(np.uint8), axis=1, bitorder="little")
        groups = (stream.reshape(-1, bits) @ powers).reshape(*scales[chosen].shape, -1)
        weights[chosen] = (groups * scales[chosen, :, None] + biases[chosen, :, None]).reshape(
            -1, weights.shape[1]
        )
    return weights


def _write_converted(
    output: Path,
    architecture: str,
    what: str,
    config: LayerConfig,
    tensors: Iterable[tuple[str, NDArray[Any]]],
    target_ids: NDArray[np.int64] | None,
    add_settings: Callable[[gguf.GGUFWriter], None],
) -> None:
    """Write a head or a draft model to a GGUF file, with matrices in float16.

    `what` describes it in error messages. `target_ids` has the target's token id for each draft token, or is
    None if the two vocabularies are the same.
    """
    writer = gguf.GGUFWriter(output, architecture)
    try:
        _add_shared_settings(writer, config)
        add_settings(writer)
        for name, values in tensors:
            writer.add_tensor(name, _converted(values, f"the {name} of {what}"))
        if target_ids is not None:
            writer.add_tensor("d2t", target_ids)
        with explain_write_errors(output):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
    except (KeyError, ValueError, TypeError, ArithmeticError, struct.error) as error:
        raise ModelFileError(
            f"the config.json of {what} has invalid settings: {shorten(error)}",
            "download it again",
        ) from error
    finally:
        writer.close()


def _interleaved(weights: NDArray[Any], head_size: int) -> NDArray[Any]:
    """Reorder the rows of each attention head, as llama.cpp's RoPE expects.

    llama.cpp rotates pairs of adjacent rows. Published weights pair each row of the first half with the
    corresponding row of the second half.
    """
    heads = weights.reshape(-1, 2, head_size // 2, weights.shape[1])
    return heads.swapaxes(1, 2).reshape(weights.shape)


def _converted(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Convert a tensor to the type in which the GGUF file stores it.

    Raises ModelFileError if a value is not finite, or too large for the type.
    """
    with np.errstate(over="ignore"):
        converted = values.astype(np.float16 if values.ndim > 1 else np.float32)
    if not np.isfinite(converted).all():
        raise ModelFileError(
            f"{name} contains values that are not finite or are out of range for {converted.dtype}",
            "download it again, or choose another one",
        )
    return converted


def _add_shared_settings(writer: gguf.GGUFWriter, config: LayerConfig) -> None:
    writer.add_context_length(config.context_tokens)
    writer.add_feed_forward_length(config.feed_forward_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_rope(writer, config.rope, config.head_size)


def _add_rope(writer: gguf.GGUFWriter, rope: RopeSettings, head_size: int) -> None:
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope.theta)
    if rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_size).astype(np.float32))
    elif rope.kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(float(rope.scaling["factor"]))
        if original := rope.scaling.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(int(original))
