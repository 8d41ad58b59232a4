"""Convert published EAGLE-3, DFlash and DSpark heads from the Hugging Face layout to GGUF."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import gguf
from numpy.typing import NDArray

from edgespec.backends.llamacpp.gguf_conversion import interleaved, write_converted
from edgespec.errors import ModelFileError, shorten
from edgespec.model.heads.dflash_files import DFlashConfig, read_dflash
from edgespec.model.heads.eagle_files import EagleConfig, EagleFiles, read_eagle
from edgespec.model.heads.rotation import ROPE_KINDS
from edgespec.model.heads.stored_tensor import StoredTensor

__all__ = ["convert_dflash_head", "convert_eagle_head"]

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
# Endings of the names of matrices that produce rotated vectors.
_ROTATED = ("q_proj.weight", "k_proj.weight")
# Number of the target's hidden states that llama.cpp's EAGLE-3 implementation reads.
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
_NAME = re.compile(r"(?:layers\.(\d+)\.)?(.*)\.weight")


def convert_eagle_head(folder: Path, target_layers: int, output: Path) -> None:
    """Convert the head in a folder to a GGUF file.

    Args:
        folder: Folder with the head's `config.json` and weights.
        target_layers: Number of layers in the target.
        output: The GGUF file to write.

    Raises:
        ModelFileError: The folder contains no EAGLE-3 head, or llama.cpp does not support the head.
        OSError: A file cannot be read or written.
    """
    head = read_eagle(folder)
    layers = _layers(folder, head, target_layers)
    tensors = (
        (_EAGLE_NAMES[name], _values(name, tensor, head.config)) for name, tensor in head.tensors.items()
    )
    add_settings = partial(_add_eagle_settings, config=head.config, layers=layers)
    write_converted(
        output, "eagle3", f"the head in {folder}", head.config, tensors, head.target_ids, add_settings
    )


def _values(name: str, tensor: StoredTensor, config: EagleConfig) -> NDArray[Any]:
    """Return a tensor's values in the order in which llama.cpp reads them."""
    values = tensor.read()
    return interleaved(values, config.head_size) if name.endswith(_ROTATED) else values


def _layers(folder: Path, head: EagleFiles, target_layers: int) -> tuple[int, ...]:
    """Return the indices of the target layers whose inputs the head reads.

    Raises:
        ModelFileError: llama.cpp does not support the head.
    """
    config, choices = head.config, head.config.layer_choices(target_layers)
    unknown = sorted(head.tensors.keys() - _EAGLE_NAMES.keys())
    if config.version != 3:
        raise ModelFileError(
            f"the head in {folder} needs no conversion, because it is an EAGLE-1 or EAGLE-2 head",
            f"use the folder itself: --head {shlex.quote(str(folder))}",
            code="wrong_file",
        )
    if unknown:
        problem = f"llama.cpp does not support the tensor {unknown[0]}"
    elif config.norm_output or config.rope.kind not in ROPE_KINDS:
        rope = f"rope_scaling of type {shorten(config.rope.kind)!r}"
        problem = f"llama.cpp does not support {'norm_output' if config.norm_output else rope}"
    elif not choices or len(choices[0]) != _STATES or max(choices[0]) >= target_layers:
        problem = f"its layers {list(config.layers or ())} do not fit a model with {target_layers} layers"
    else:
        return choices[0]
    raise ModelFileError(
        f"the head in {folder} cannot be converted: {problem}",
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
    """Convert the head in a folder to a GGUF file.

    Args:
        folder: Folder with the head's `config.json` and weights.
        target_layers: Number of layers in the target.
        output: The GGUF file to write.

    Raises:
        ModelFileError: The folder contains no DFlash or DSpark head, or the head does not fit the target.
        OSError: A file cannot be read or written.
    """
    head = read_dflash(folder)
    if problem := _problem(head.config, target_layers):
        raise ModelFileError(
            f"the head in {folder} cannot be converted: {problem}",
            "choose a DFlash or DSpark head for this model",
            code="model_file_not_supported",
        )
    tensors = ((_gguf_name(name), tensor.read()) for name, tensor in head.tensors.items())
    add_settings = partial(_add_dflash_settings, config=head.config)
    write_converted(
        output, "dflash", f"the head in {folder}", head.config, tensors, head.target_ids, add_settings
    )


def _problem(config: DFlashConfig, target_layers: int) -> str:
    if not config.states or not all(0 <= state <= target_layers for state in config.states):
        return f"it reads the layers {list(config.states)}, but the model has {target_layers} layers"
    if config.rope.kind not in ROPE_KINDS:
        return f"llama.cpp does not support rope_scaling of type {shorten(config.rope.kind)!r}"
    if len({*config.windows} - {0}) > 1:
        return "its layers have sliding windows of different sizes"
    return ""


def _gguf_name(name: str) -> str:
    match = _NAME.fullmatch(name)
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
