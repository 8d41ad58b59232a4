"""Convert a published DFlash or DSpark head from the Hugging Face layout to GGUF."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import gguf

from edgespec.backends.llamacpp.gguf_conversion import write_converted
from edgespec.errors import ModelFileError, shorten
from edgespec.heads.dflash_config import DFlashConfig
from edgespec.heads.dflash_files import read_dflash
from edgespec.heads.rotation import ROPE_KINDS

__all__ = ["convert_dflash_head"]

# Maps published tensor names to GGUF names. Names of layer tensors are prefixed with `blk.<layer>.`.
_NAMES = {
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
            "choose a DFlash or DSpark head for this target",
        )
    tensors = ((_gguf_name(name), tensor.read()) for name, tensor in head.tensors.items())
    add_settings = partial(_add_settings, config=head.config)
    write_converted(
        output, "dflash", f"the head in {folder}", head.config, tensors, head.target_ids, add_settings
    )


def _problem(config: DFlashConfig, target_layers: int) -> str:
    if not config.states or not all(0 <= state <= target_layers for state in config.states):
        return f"it reads the layers {list(config.states)}, but the target has {target_layers} layers"
    if config.rope.kind not in ROPE_KINDS:
        return f"llama.cpp does not support rope_scaling of type {shorten(config.rope.kind)!r}"
    if len({*config.windows} - {0}) > 1:
        return "its layers have sliding windows of different sizes"
    return ""


def _gguf_name(name: str) -> str:
    match = _NAME.fullmatch(name)
    assert match is not None
    layer, part = match.groups()
    return f"{'' if layer is None else f'blk.{layer}.'}{_NAMES[part]}.weight"


def _add_settings(writer: gguf.GGUFWriter, config: DFlashConfig) -> None:
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
