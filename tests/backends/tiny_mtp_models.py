"""Tiny GGUF files with random weights and multi-token prediction (MTP) layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from tests.backends.tiny_gguf import (
    CHATML,
    EXPERTS,
    FEED_FORWARD,
    HEAD,
    INNER,
    KERNEL,
    SIZE,
    WORDS,
    add_vocabulary,
    ends,
    finish,
    open_writer,
)
from tests.backends.tiny_mtp_layers import (
    GROUPS,
    INDEX,
    KEY_HEADS,
    KEY_RANK,
    OUTPUT_RANK,
    QUERY_RANK,
    RATIOS,
    ROTATED,
    STATE,
    STREAMS,
    TOP_TOKENS,
    VALUE_HEADS,
    WINDOW,
    Shape,
    hyper_connection,
    layer_tensors,
    predictor,
)

__all__ = ["SHAPES", "write_deepseek4", "write_mtp_model", "write_mtp_sidecar"]

_QWEN = Shape("post_attention_norm", qk_norms=True, gated=True, delta=True, shared_gate=True)
SHAPES = {
    "bailingmoe3": Shape(latent=True, biased=True, kda=True),
    "cohere2moe": Shape(None, window=True),
    "deepseek2": Shape(latent=True, biased=True),
    "deepseek32": Shape(latent=True, biased=True, indexer=True),
    "deepseek4": Shape(biased=True, window=True, hyper=True),
    "glm-dsa": Shape(latent=True, biased=True, indexer=True),
    "glm4moe": Shape("post_attention_norm", biased=True),
    "hy_v3": Shape(qk_norms=True),
    "nemotron_h_moe": Shape("post_attention_norm", biased=True, mamba=True),
    "mimo2": Shape(experts=False, window=True, fused=True),
    "qwen35": _QWEN._replace(experts=False),
    "qwen35moe": _QWEN,
    "qwen3next": _QWEN,
    "step35": Shape(window=True),
}


def write_mtp_model(
    path: Path,
    architecture: str,
    *,
    template: str | None = CHATML,
    seed: int = 0,
    mtp_layers: int = 1,
    fuse_experts: bool = False,
) -> Path:
    """Write a model of two layers, followed by layers that each predict one more token.

    With `fuse_experts`, the experts' gate and up projections are one tensor.
    """
    random = np.random.default_rng(seed)
    shape, layers = SHAPES[architecture], 2
    feed_forward = 0 if shape.mamba else FEED_FORWARD
    writer = open_writer(path, architecture, layers=layers + mtp_layers, feed_forward=feed_forward)
    writer.add_head_count(2)
    _add_sizes(writer, shape, layers, mtp_layers)
    if mtp_layers:
        writer.add_nextn_predict_layers(mtp_layers)
    vocab = add_vocabulary(writer, WORDS, template)
    tensors = ends(random, vocab)
    if shape.hyper:
        tensors |= hyper_connection(random, "output_hc_", STREAMS, 1)
    for layer in range(layers + mtp_layers):
        tensors |= layer_tensors(random, layer, shape, architecture, is_trunk=layer < layers)
        if layer >= layers:
            tensors |= predictor(random, layer)
            if shape.kda:
                tensors[f"blk.{layer}.layer_output_norm.weight"] = tensors.pop(
                    f"blk.{layer}.nextn.shared_head_norm.weight"
                )
    for name in [name for name in tensors if fuse_experts and "ffn_gate_exps" in name]:
        gate_and_up = [tensors.pop(name), tensors.pop(name.replace("gate", "up"))]
        tensors[name.replace("gate", "gate_up")] = np.concatenate(gate_and_up, axis=1)
    finish(writer, {name: _quiet(name, tensor) for name, tensor in tensors.items()})
    return path


def write_deepseek4(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """Write a model with several residual streams and compressed keys, without MTP layers."""
    return write_mtp_model(path, "deepseek4", template=template, seed=seed, mtp_layers=0)


def _add_sizes(writer: gguf.GGUFWriter, shape: Shape, layers: int, mtp_layers: int) -> None:
    if shape.indexer:
        writer.add_indexer_head_count(2)
        writer.add_indexer_key_length(INDEX)
        writer.add_indexer_top_k(TOP_TOKENS)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if shape.latent:
        writer.add_head_count_kv([0, 1, *[1] * mtp_layers] if shape.kda else 1)
        writer.add_q_lora_rank(QUERY_RANK)
        writer.add_kv_lora_rank(KEY_RANK)
        writer.add_key_length(KEY_RANK + ROTATED)
        writer.add_value_length(KEY_RANK)
        writer.add_key_length_mla(HEAD)
        writer.add_value_length_mla(HEAD)
        writer.add_rope_dimension_count(ROTATED)
    elif shape.hyper:
        _add_hyper_sizes(writer, mtp_layers)
    else:
        writer.add_head_count_kv([0, 2, *[2] * mtp_layers] if shape.mamba else 2)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_rope_dimension_count(HEAD)
    if shape.experts:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(FEED_FORWARD)
        writer.add_leading_dense_block_count(0 if shape.delta else 1)
    writer.add_expert_feed_forward_length(FEED_FORWARD)
    if shape.mamba:
        writer.add_layer_norm_eps(1e-5)
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_group_count(1)
        writer.add_ssm_time_step_rank(VALUE_HEADS)
        writer.add_ssm_inner_size(INNER)
    if shape.kda:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_kda_head_dim(STATE)
        writer.add_float32(f"{writer.arch}.kda.gate_lower_bound", -5.0)
    if shape.delta:
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_group_count(KEY_HEADS)
        writer.add_ssm_time_step_rank(VALUE_HEADS)
        writer.add_ssm_inner_size(STATE * VALUE_HEADS)
        writer.add_full_attention_interval(2)
    if shape.window:
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern([layer == 0 for layer in range(layers + mtp_layers)])
        writer.add_logit_scale(1.0)


def _add_hyper_sizes(writer: gguf.GGUFWriter, mtp_layers: int) -> None:
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(ROTATED)
    writer.add_q_lora_rank(QUERY_RANK)
    writer.add_indexer_head_count(2)
    writer.add_indexer_key_length(INDEX)
    writer.add_indexer_top_k(TOP_TOKENS)
    layers = len(RATIOS) + mtp_layers
    writer.add_array(f"{writer.arch}.attention.compress_ratios", [*RATIOS, *[0] * mtp_layers])
    writer.add_array(f"{writer.arch}.swiglu_clamp_exp", [10.0] * layers)
    writer.add_float32(f"{writer.arch}.attention.compress_rope_freq_base", 10000.0)
    writer.add_float32(f"{writer.arch}.hyper_connection.epsilon", 1e-6)
    for key, value in {
        "embedding_length_out": STREAMS * SIZE,
        "attention.output_group_count": GROUPS,
        "attention.output_lora_rank": OUTPUT_RANK,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 3,
        "hash_layer_count": 0,
        "expert_gating_func": 4,
    }.items():
        writer.add_uint32(f"{writer.arch}.{key}", value)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)


def _quiet(name: str, tensor: np.ndarray) -> np.ndarray:
    """Make layers add little to their input, so that the next token depends mostly on the last one."""
    loud = any(part in name for part in ("attn_output", "ffn_down", "ssm_out"))
    return tensor * np.float32(0.3) if loud else tensor


def write_mtp_sidecar(path: Path, model: Path, **changes: int | Sequence[int]) -> Path:
    """Write a model's MTP layers to a separate file. `changes` overrides metadata values."""
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    blocks, count = (
        reader.fields[f"{architecture}.{key}"].contents() for key in ("block_count", "nextn_predict_layers")
    )
    own = tuple(f"blk.{layer}." for layer in range(blocks - count, blocks))
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith((f"{architecture}.", "tokenizer.")):
            value = changes.get(name.rpartition(".")[2], field.contents())
            writer.add_key_value(name, value, field.types[0], field.types[-1])
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or tensor.name.startswith(own):
            writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer, {})
    return path
