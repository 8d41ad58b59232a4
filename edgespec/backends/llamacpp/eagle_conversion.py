"""Convert a published EAGLE-3 head from the Hugging Face layout to GGUF."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import gguf
from numpy.typing import NDArray

from edgespec.backends.llamacpp.gguf_conversion import interleaved, write_converted
from edgespec.errors import ModelFileError, shorten
from edgespec.heads.eagle_config import EagleConfig
from edgespec.heads.eagle_files import EagleFiles, read_eagle
from edgespec.heads.rotation import ROPE_KINDS
from edgespec.heads.stored_tensor import StoredTensor

__all__ = ["convert_eagle_head"]

# Maps canonical tensor names (see `edgespec.heads.eagle_files`) to GGUF names.
_NAMES = {
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
    tensors = ((_NAMES[name], _values(name, tensor, head.config)) for name, tensor in head.tensors.items())
    add_settings = partial(_add_settings, config=head.config, layers=layers)
    write_converted(
        output, "eagle3", f"the head in {folder}", head.config, tensors, head.target_ids, add_settings
    )


def _values(name: str, tensor: StoredTensor, config: EagleConfig) -> NDArray[Any]:
    """Return a tensor's values in the order in which llama.cpp reads them."""
    values = tensor.read()
    return interleaved(values, config.head_size) if name.endswith(_ROTATED) else values


def _layers(folder: Path, head: EagleFiles, target_layers: int) -> tuple[int, ...]:
    """Return the indices of the target's layers whose inputs the head reads.

    Raises:
        ModelFileError: llama.cpp does not support the head.
    """
    config, choices = head.config, head.config.layer_choices(target_layers)
    unknown = sorted(head.tensors.keys() - _NAMES.keys())
    if config.version != 3:
        raise ModelFileError(
            f"the head in {folder} needs no conversion, because it is an EAGLE-1 or EAGLE-2 head",
            f"use the folder itself: --head {shlex.quote(str(folder))}",
        )
    if unknown:
        problem = f"llama.cpp does not support the tensor {unknown[0]}"
    elif config.norm_output or config.rope.kind not in ROPE_KINDS:
        rope = f"rope_scaling of type {shorten(config.rope.kind)!r}"
        problem = f"llama.cpp does not support {'norm_output' if config.norm_output else rope}"
    elif not choices or len(choices[0]) != _STATES or max(choices[0]) >= target_layers:
        problem = f"its layers {list(config.layers or ())} do not fit a target with {target_layers} layers"
    else:
        return choices[0]
    raise ModelFileError(
        f"the head in {folder} cannot be converted: {problem}", "choose an EAGLE-3 head for this target"
    )


def _add_settings(writer: gguf.GGUFWriter, config: EagleConfig, layers: tuple[int, ...]) -> None:
    writer.add_tokenizer_model("none")
    writer.add_block_count(1)
    writer.add_embedding_length(config.hidden_size)
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", config.target_size)
    writer.add_bool("eagle3.norm_before_residual", config.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", config.norm_before_fc)
