"""GGUF files of a few kilobytes with random weights and layers for multi-token prediction (MTP)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from tests.backends.tiny_models import (
    _EXPERTS,
    _FEED_FORWARD,
    _HEAD,
    _INNER,
    _KERNEL,
    _SIZE,
    CHATML,
    WORDS,
    Tensors,
    _attention,
    _ends,
    _finish,
    _norms_and_feed_forward,
    _ones,
    _open,
    _vocabulary,
    _weights,
)

__all__ = ["SHAPES", "write_deepseek4", "write_mtp_model", "write_mtp_sidecar"]

# Sizes of the recurrent layers: of a state, and the number of heads of keys and values.
_STATE, _KEY_HEADS, _VALUE_HEADS = 16, 2, 4
# Sizes of the compressed queries and keys of latent attention, and of the part of a key that is rotated.
_QUERY_RANK, _KEY_RANK, _ROTATED = 24, 16, 8
_WINDOW = 16
# The size of an indexer's keys, and the number of tokens that it chooses.
_INDEX, _TOP_TOKENS = 64, 24
# Residual streams, the groups and the rank of attention's output matrix, and the numbers of tokens that a
# compressed key of each layer stands for. llama.cpp supports no other numbers of streams and of tokens.
_STREAMS, _GROUPS, _OUTPUT_RANK, _RATIOS = 4, 2, 8, (4, 128)


class Shape(NamedTuple):
    """What the layers of an architecture consist of.

    norm: the norm before the feed-forward block. experts: from the second layer on. shared_gate: for the
    expert that all tokens share. biased: the choice of experts. qk_norms: of queries and keys. gated: each
    query has a gate. delta: the first layer is a gated delta net. window: the first layer has a sliding
    window. fused: queries, keys and values are one matrix. latent: keys and values are one vector. indexer:
    it chooses which tokens are attended to. kda: the first layer is Kimi delta attention, and the heads of
    the others have gates. hyper: there are several residual streams, and the layers attend to a window and to
    compressed keys of the tokens before it. mamba: the first layer is a Mamba 2 mixer, the second attention,
    and only the layers after them have a feed-forward block, whose experts have no gate.
    """

    norm: str | None = "ffn_norm"
    experts: bool = True
    shared: bool = True
    shared_gate: bool = False
    biased: bool = False
    qk_norms: bool = False
    gated: bool = False
    delta: bool = False
    window: bool = False
    fused: bool = False
    latent: bool = False
    indexer: bool = False
    kda: bool = False
    mamba: bool = False
    hyper: bool = False


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
    path: Path, architecture: str, *, template: str | None = CHATML, seed: int = 0, mtp_layers: int = 1
) -> Path:
    """Write a model of two layers, followed by layers that each predict one more token."""
    random = np.random.default_rng(seed)
    shape, layers = SHAPES[architecture], 2
    feed_forward = 0 if shape.mamba else _FEED_FORWARD
    writer = _open(path, architecture, layers=layers + mtp_layers, feed_forward=feed_forward)
    writer.add_head_count(2)
    _add_sizes(writer, shape, layers, mtp_layers)
    if mtp_layers:
        writer.add_nextn_predict_layers(mtp_layers)
    vocab = _vocabulary(writer, WORDS, template)
    tensors = _ends(random, vocab)
    if shape.hyper:
        tensors |= _hyper_connection(random, "output_hc_", _STREAMS, 1)
    for layer in range(layers + mtp_layers):
        tensors |= _layer(random, layer, shape, architecture, is_trunk=layer < layers)
        if layer >= layers:
            tensors |= _predictor(random, layer)
            if shape.kda:
                tensors[f"blk.{layer}.layer_output_norm.weight"] = tensors.pop(
                    f"blk.{layer}.nextn.shared_head_norm.weight"
                )
    _finish(writer, {name: _quiet(name, tensor) for name, tensor in tensors.items()})
    return path


def write_deepseek4(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """Write a model with several residual streams and compressed keys, without layers for MTP."""
    return write_mtp_model(path, "deepseek4", template=template, seed=seed, mtp_layers=0)


def _add_sizes(writer: gguf.GGUFWriter, shape: Shape, layers: int, mtp_layers: int) -> None:
    if shape.indexer:
        writer.add_indexer_head_count(2)
        writer.add_indexer_key_length(_INDEX)
        writer.add_indexer_top_k(_TOP_TOKENS)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if shape.latent:
        writer.add_head_count_kv([0, 1, *[1] * mtp_layers] if shape.kda else 1)
        writer.add_q_lora_rank(_QUERY_RANK)
        writer.add_kv_lora_rank(_KEY_RANK)
        writer.add_key_length(_KEY_RANK + _ROTATED)
        writer.add_value_length(_KEY_RANK)
        writer.add_key_length_mla(_HEAD)
        writer.add_value_length_mla(_HEAD)
        writer.add_rope_dimension_count(_ROTATED)
    elif shape.hyper:
        _add_hyper_sizes(writer, mtp_layers)
    else:
        writer.add_head_count_kv([0, 2, *[2] * mtp_layers] if shape.mamba else 2)
        writer.add_key_length(_HEAD)
        writer.add_value_length(_HEAD)
        writer.add_rope_dimension_count(_HEAD)
    if shape.experts:
        writer.add_expert_count(_EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(_FEED_FORWARD)
        writer.add_leading_dense_block_count(0 if shape.delta else 1)
    writer.add_expert_feed_forward_length(_FEED_FORWARD)
    if shape.mamba:
        writer.add_layer_norm_eps(1e-5)
        writer.add_ssm_conv_kernel(_KERNEL)
        writer.add_ssm_state_size(_STATE)
        writer.add_ssm_group_count(1)
        writer.add_ssm_time_step_rank(_VALUE_HEADS)
        writer.add_ssm_inner_size(_INNER)
    if shape.kda:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_ssm_conv_kernel(_KERNEL)
        writer.add_kda_head_dim(_STATE)
        writer.add_float32(f"{writer.arch}.kda.gate_lower_bound", -5.0)
    if shape.delta:
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        writer.add_ssm_conv_kernel(_KERNEL)
        writer.add_ssm_state_size(_STATE)
        writer.add_ssm_group_count(_KEY_HEADS)
        writer.add_ssm_time_step_rank(_VALUE_HEADS)
        writer.add_ssm_inner_size(_STATE * _VALUE_HEADS)
        writer.add_full_attention_interval(2)
    if shape.window:
        writer.add_sliding_window(_WINDOW)
        writer.add_sliding_window_pattern([layer == 0 for layer in range(layers + mtp_layers)])
        writer.add_logit_scale(1.0)


def _add_hyper_sizes(writer: gguf.GGUFWriter, mtp_layers: int) -> None:
    writer.add_head_count_kv(1)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_dimension_count(_ROTATED)
    writer.add_q_lora_rank(_QUERY_RANK)
    writer.add_indexer_head_count(2)
    writer.add_indexer_key_length(_INDEX)
    writer.add_indexer_top_k(_TOP_TOKENS)
    layers = len(_RATIOS) + mtp_layers
    writer.add_array(f"{writer.arch}.attention.compress_ratios", [*_RATIOS, *[0] * mtp_layers])
    writer.add_array(f"{writer.arch}.swiglu_clamp_exp", [10.0] * layers)
    writer.add_float32(f"{writer.arch}.attention.compress_rope_freq_base", 10000.0)
    writer.add_float32(f"{writer.arch}.hyper_connection.epsilon", 1e-6)
    for key, value in {
        "embedding_length_out": _STREAMS * _SIZE,
        "attention.output_group_count": _GROUPS,
        "attention.output_lora_rank": _OUTPUT_RANK,
        "hyper_connection.count": _STREAMS,
        "hyper_connection.sinkhorn_iterations": 3,
        "hash_layer_count": 0,
        "expert_gating_func": 4,
    }.items():
        writer.add_uint32(f"{writer.arch}.{key}", value)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)


def _layer(
    random: np.random.Generator, layer: int, shape: Shape, architecture: str, *, is_trunk: bool
) -> Tensors:
    block = f"blk.{layer}."
    tensors = {f"{block}attn_norm.weight": _ones(_SIZE)}
    if shape.mamba and layer == 0:
        return tensors | _mamba(random, block)
    if shape.norm and not (shape.mamba and is_trunk):
        tensors[f"{block}{shape.norm}.weight"] = _ones(_SIZE)
    if shape.delta and layer == 0:
        tensors |= _delta_net(random, block, architecture)
    elif shape.kda and layer == 0:
        tensors |= _kimi_delta_attention(random, block)
    elif shape.hyper:
        tensors |= _compressed_attention(random, block, _RATIOS[layer] if is_trunk else 0)
        for part in ("attn", "ffn"):
            tensors |= _hyper_connection(random, f"{block}hc_{part}_", (2 + _STREAMS) * _STREAMS, 3)
    elif shape.latent:
        tensors |= _latent_attention(random, block)
        if shape.kda:
            tensors[f"{block}attn_gate.weight"] = _weights(random, 2, _SIZE)
        if shape.indexer:
            tensors |= _indexer(random, block)
    else:
        tensors |= _attention(random, layer, heads_kv=2)
        if shape.gated:
            tensors[f"{block}attn_q.weight"] = _weights(random, 4 * _HEAD, _SIZE)
        if shape.qk_norms:
            tensors |= {f"{block}attn_{part}_norm.weight": _ones(_HEAD) for part in "qk"}
        if shape.fused:
            parts = [tensors.pop(f"{block}attn_{part}.weight") for part in "qkv"]
            tensors[f"{block}attn_qkv.weight"] = np.concatenate(parts)
    if shape.mamba and is_trunk:
        return tensors
    if shape.experts and (layer or shape.delta or shape.hyper):
        return tensors | _experts(random, block, shape)
    dense = _norms_and_feed_forward(random, layer)
    return tensors | {name: tensor for name, tensor in dense.items() if not name.endswith("norm.weight")}


def _experts(random: np.random.Generator, block: str, shape: Shape) -> Tensors:
    up, down = (_FEED_FORWARD, _SIZE), (_SIZE, _FEED_FORWARD)
    tensors = {f"{block}ffn_gate_inp.weight": _weights(random, _EXPERTS, _SIZE)}
    for name, size in (("gate", up), ("up", up), ("down", down)):
        if name == "gate" and shape.mamba:
            continue
        tensors[f"{block}ffn_{name}_exps.weight"] = _weights(random, _EXPERTS, *size)
        tensors[f"{block}ffn_{name}_shexp.weight"] = _weights(random, *size)
    if shape.shared_gate:
        tensors[f"{block}ffn_gate_inp_shexp.weight"] = _ones(_SIZE)
    if shape.biased:
        tensors[f"{block}exp_probs_b.bias"] = np.zeros(_EXPERTS, np.float32)
    return tensors


def _delta_net(random: np.random.Generator, block: str, architecture: str) -> Tensors:
    keys, values = _STATE * _KEY_HEADS, _STATE * _VALUE_HEADS
    tensors = {
        f"{block}attn_qkv.weight": _weights(random, 2 * keys + values, _SIZE),
        f"{block}attn_gate.weight": _weights(random, values, _SIZE),
        f"{block}ssm_conv1d.weight": _weights(random, 2 * keys + values, _KERNEL),
        f"{block}ssm_dt.bias": _ones(_VALUE_HEADS),
        f"{block}ssm_a": -_ones(_VALUE_HEADS),
        f"{block}ssm_norm.weight": _ones(_STATE),
        f"{block}ssm_out.weight": _weights(random, _SIZE, values),
    }
    if architecture == "qwen3next":
        tensors[f"{block}ssm_ba.weight"] = _weights(random, 2 * _VALUE_HEADS, _SIZE)
    else:
        tensors[f"{block}ssm_beta.weight"] = _weights(random, _VALUE_HEADS, _SIZE)
        tensors[f"{block}ssm_alpha.weight"] = _weights(random, _VALUE_HEADS, _SIZE)
    return tensors


def _kimi_delta_attention(random: np.random.Generator, block: str) -> Tensors:
    heads = 2
    inner = heads * _STATE
    tensors = {
        f"{block}ssm_f_a.weight": _weights(random, inner, _SIZE),
        f"{block}ssm_g_a.weight": _weights(random, inner, _SIZE),
        f"{block}ssm_beta.weight": _weights(random, heads, _SIZE),
        f"{block}ssm_a": np.ones((heads, 1), np.float32),
        f"{block}ssm_dt.bias": _ones(inner),
        f"{block}ssm_norm.weight": _ones(_STATE),
        f"{block}attn_output.weight": _weights(random, _SIZE, inner),
    }
    for part in "qkv":
        tensors[f"{block}attn_{part}.weight"] = _weights(random, inner, _SIZE)
        tensors[f"{block}ssm_conv1d_{part}.weight"] = _weights(random, 1, inner, 1, _KERNEL)
    return tensors


def _mamba(random: np.random.Generator, block: str) -> Tensors:
    mixed = _INNER + 2 * _STATE
    return {
        f"{block}ssm_in.weight": _weights(random, _INNER + mixed + _VALUE_HEADS, _SIZE),
        f"{block}ssm_conv1d.weight": _weights(random, mixed, _KERNEL),
        f"{block}ssm_conv1d.bias": np.zeros(mixed, np.float32),
        f"{block}ssm_dt.bias": _ones(_VALUE_HEADS),
        f"{block}ssm_a": -np.ones((_VALUE_HEADS, 1), np.float32),
        f"{block}ssm_d": np.ones((_VALUE_HEADS, 1), np.float32),
        f"{block}ssm_norm.weight": np.ones((1, _INNER), np.float32),
        f"{block}ssm_out.weight": _weights(random, _SIZE, _INNER),
    }


def _indexer(random: np.random.Generator, block: str) -> Tensors:
    return {
        f"{block}indexer.k_norm.weight": _ones(_INDEX),
        f"{block}indexer.k_norm.bias": np.zeros(_INDEX, np.float32),
        f"{block}indexer.proj.weight": _weights(random, 2, _SIZE),
        f"{block}indexer.attn_k.weight": _weights(random, _INDEX, _SIZE),
        f"{block}indexer.attn_q_b.weight": _weights(random, 2 * _INDEX, _QUERY_RANK),
    }


def _latent_attention(random: np.random.Generator, block: str) -> Tensors:
    heads, kept = 2, _HEAD - _ROTATED
    return {
        f"{block}attn_q_a.weight": _weights(random, _QUERY_RANK, _SIZE),
        f"{block}attn_q_a_norm.weight": _ones(_QUERY_RANK),
        f"{block}attn_q_b.weight": _weights(random, heads * _HEAD, _QUERY_RANK),
        f"{block}attn_kv_a_mqa.weight": _weights(random, _KEY_RANK + _ROTATED, _SIZE),
        f"{block}attn_kv_a_norm.weight": _ones(_KEY_RANK),
        f"{block}attn_k_b.weight": _weights(random, heads, _KEY_RANK, kept),
        f"{block}attn_v_b.weight": _weights(random, heads, _HEAD, _KEY_RANK),
        f"{block}attn_output.weight": _weights(random, _SIZE, heads * _HEAD),
    }


def _compressed_attention(random: np.random.Generator, block: str, ratio: int) -> Tensors:
    heads = 2
    tensors = {
        f"{block}attn_sinks.weight": np.zeros(heads, np.float32),
        f"{block}attn_q_a.weight": _weights(random, _QUERY_RANK, _SIZE),
        f"{block}attn_q_a_norm.weight": _ones(_QUERY_RANK),
        f"{block}attn_q_b.weight": _weights(random, heads * _HEAD, _QUERY_RANK),
        f"{block}attn_kv.weight": _weights(random, _HEAD, _SIZE),
        f"{block}attn_kv_a_norm.weight": _ones(_HEAD),
        f"{block}attn_output_a.weight": _weights(random, _GROUPS * _OUTPUT_RANK, heads * _HEAD // _GROUPS),
        f"{block}attn_output_b.weight": _weights(random, _SIZE, _GROUPS * _OUTPUT_RANK),
    }
    if ratio:
        tensors |= _compressor(random, f"{block}attn_compressor_", _HEAD, ratio)
    if ratio == 4:
        tensors |= _compressor(random, f"{block}indexer_compressor_", _INDEX, ratio)
        tensors[f"{block}indexer.proj.weight"] = _weights(random, 2, _SIZE)
        tensors[f"{block}indexer.attn_q_b.weight"] = _weights(random, 2 * _INDEX, _QUERY_RANK)
    return tensors


def _compressor(random: np.random.Generator, name: str, size: int, ratio: int) -> Tensors:
    width = 2 * size if ratio == 4 else size
    return {
        f"{name}kv.weight": _weights(random, width, _SIZE),
        f"{name}gate.weight": _weights(random, width, _SIZE),
        f"{name}ape.weight": _weights(random, ratio, width),
        f"{name}norm.weight": _ones(size),
    }


def _hyper_connection(random: np.random.Generator, name: str, mixes: int, scales: int) -> Tensors:
    return {
        f"{name}fn.weight": _weights(random, mixes, _STREAMS * _SIZE),
        f"{name}base.weight": np.zeros(mixes, np.float32),
        f"{name}scale.weight": _ones(scales),
    }


def _predictor(random: np.random.Generator, layer: int) -> Tensors:
    """Return what joins an embedding and a hidden state.

    The embedding passes through almost unchanged, so that a random layer is sometimes right.
    """
    block = f"blk.{layer}.nextn."
    joined = [np.eye(_SIZE, dtype=np.float32), _weights(random, _SIZE, _SIZE) * 0.1]
    norms = ("enorm", "hnorm", "shared_head_norm")
    return {
        f"{block}eh_proj.weight": np.concatenate(joined, axis=1),
        **{f"{block}{norm}.weight": _ones(_SIZE) for norm in norms},
    }


def _quiet(name: str, tensor: np.ndarray) -> np.ndarray:
    """Let layers add little to their input, so that the next token depends mostly on the last one."""
    loud = any(part in name for part in ("attn_output", "ffn_down", "ssm_out"))
    return tensor * np.float32(0.3) if loud else tensor


def write_mtp_sidecar(path: Path, model: Path, **changes: int | Sequence[int]) -> Path:
    """Write the MTP layers of a model to a file of their own. `changes`: other values of the metadata."""
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
    _finish(writer, {})
    return path
