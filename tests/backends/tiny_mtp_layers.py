"""Random tensors for the layers that `tiny_mtp_models.py` combines into models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.backends.tiny_gguf import (
    EXPERTS,
    FEED_FORWARD,
    HEAD,
    INNER,
    KERNEL,
    SIZE,
    Tensors,
    attention,
    norms_and_feed_forward,
    ones,
    random_weights,
)

# Size of a recurrent layer's state, and its numbers of key and value heads.
STATE, KEY_HEADS, VALUE_HEADS = 16, 2, 4
# Sizes of latent attention's compressed queries and keys, and of the rotated part of a key.
QUERY_RANK, KEY_RANK, ROTATED = 24, 16, 8
WINDOW = 16
# Size of an indexer's keys, and number of tokens that the indexer selects.
INDEX, TOP_TOKENS = 64, 24
# Number of residual streams, number of groups and rank of the attention output matrix, and the number of
# tokens that each layer combines into a compressed key. llama.cpp supports no other numbers of streams and
# tokens.
STREAMS, GROUPS, OUTPUT_RANK, RATIOS = 4, 2, 8, (4, 128)


class Shape(NamedTuple):
    """The components of an architecture's layers.

    Attributes:
        norm: The norm before the feed-forward block.
        experts: Whether layers from the second onwards have experts.
        shared_gate: Whether the shared expert has a gate.
        biased: Whether the router has a bias.
        qk_norms: Whether queries and keys are normalised.
        gated: Whether each query has a gate.
        delta: Whether the first layer is a gated delta net.
        window: Whether the first layer has a sliding window.
        fused: Whether queries, keys and values are one matrix.
        latent: Whether keys and values are one vector.
        indexer: Whether an indexer selects the tokens to attend to.
        kda: Whether the first layer is Kimi delta attention, and the other layers' heads have gates.
        hyper: Whether there are several residual streams, and layers attend to a window and to compressed
        keys
            of earlier tokens.
        mamba: Whether the first layer is a Mamba 2 mixer and the second one attention. Only the layers after
            them have a feed-forward block, and its experts have no gate.
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


def layer_tensors(
    random: np.random.Generator, layer: int, shape: Shape, architecture: str, *, is_trunk: bool
) -> Tensors:
    block = f"blk.{layer}."
    tensors = {f"{block}attn_norm.weight": ones(SIZE)}
    if shape.mamba and layer == 0:
        return tensors | _mamba(random, block)
    if shape.norm and not (shape.mamba and is_trunk):
        tensors[f"{block}{shape.norm}.weight"] = ones(SIZE)
    if shape.delta and layer == 0:
        tensors |= _delta_net(random, block, architecture)
    elif shape.kda and layer == 0:
        tensors |= _kimi_delta_attention(random, block)
    elif shape.hyper:
        tensors |= _compressed_attention(random, block, RATIOS[layer] if is_trunk else 0)
        for part in ("attn", "ffn"):
            tensors |= hyper_connection(random, f"{block}hc_{part}_", (2 + STREAMS) * STREAMS, 3)
    elif shape.latent:
        tensors |= _latent_attention(random, block)
        if shape.kda:
            tensors[f"{block}attn_gate.weight"] = random_weights(random, 2, SIZE)
        if shape.indexer:
            tensors |= _indexer(random, block)
    else:
        tensors |= attention(random, layer, heads_kv=2)
        if shape.gated:
            tensors[f"{block}attn_q.weight"] = random_weights(random, 4 * HEAD, SIZE)
        if shape.qk_norms:
            tensors |= {f"{block}attn_{part}_norm.weight": ones(HEAD) for part in "qk"}
        if shape.fused:
            parts = [tensors.pop(f"{block}attn_{part}.weight") for part in "qkv"]
            tensors[f"{block}attn_qkv.weight"] = np.concatenate(parts)
    if shape.mamba and is_trunk:
        return tensors
    if shape.experts and (layer or shape.delta or shape.hyper):
        return tensors | _experts(random, block, shape)
    dense = norms_and_feed_forward(random, layer)
    return tensors | {name: tensor for name, tensor in dense.items() if not name.endswith("norm.weight")}


def _experts(random: np.random.Generator, block: str, shape: Shape) -> Tensors:
    up, down = (FEED_FORWARD, SIZE), (SIZE, FEED_FORWARD)
    tensors = {f"{block}ffn_gate_inp.weight": random_weights(random, EXPERTS, SIZE)}
    for name, size in (("gate", up), ("up", up), ("down", down)):
        if name == "gate" and shape.mamba:
            continue
        tensors[f"{block}ffn_{name}_exps.weight"] = random_weights(random, EXPERTS, *size)
        tensors[f"{block}ffn_{name}_shexp.weight"] = random_weights(random, *size)
    if shape.shared_gate:
        tensors[f"{block}ffn_gate_inp_shexp.weight"] = ones(SIZE)
    if shape.biased:
        tensors[f"{block}exp_probs_b.bias"] = np.zeros(EXPERTS, np.float32)
    return tensors


def _delta_net(random: np.random.Generator, block: str, architecture: str) -> Tensors:
    keys, values = STATE * KEY_HEADS, STATE * VALUE_HEADS
    tensors = {
        f"{block}attn_qkv.weight": random_weights(random, 2 * keys + values, SIZE),
        f"{block}attn_gate.weight": random_weights(random, values, SIZE),
        f"{block}ssm_conv1d.weight": random_weights(random, 2 * keys + values, KERNEL),
        f"{block}ssm_dt.bias": ones(VALUE_HEADS),
        f"{block}ssm_a": -ones(VALUE_HEADS),
        f"{block}ssm_norm.weight": ones(STATE),
        f"{block}ssm_out.weight": random_weights(random, SIZE, values),
    }
    if architecture == "qwen3next":
        tensors[f"{block}ssm_ba.weight"] = random_weights(random, 2 * VALUE_HEADS, SIZE)
    else:
        tensors[f"{block}ssm_beta.weight"] = random_weights(random, VALUE_HEADS, SIZE)
        tensors[f"{block}ssm_alpha.weight"] = random_weights(random, VALUE_HEADS, SIZE)
    return tensors


def _kimi_delta_attention(random: np.random.Generator, block: str) -> Tensors:
    heads = 2
    inner = heads * STATE
    tensors = {
        f"{block}ssm_f_a.weight": random_weights(random, inner, SIZE),
        f"{block}ssm_g_a.weight": random_weights(random, inner, SIZE),
        f"{block}ssm_beta.weight": random_weights(random, heads, SIZE),
        f"{block}ssm_a": np.ones((heads, 1), np.float32),
        f"{block}ssm_dt.bias": ones(inner),
        f"{block}ssm_norm.weight": ones(STATE),
        f"{block}attn_output.weight": random_weights(random, SIZE, inner),
    }
    for part in "qkv":
        tensors[f"{block}attn_{part}.weight"] = random_weights(random, inner, SIZE)
        tensors[f"{block}ssm_conv1d_{part}.weight"] = random_weights(random, 1, inner, 1, KERNEL)
    return tensors


def _mamba(random: np.random.Generator, block: str) -> Tensors:
    mixed = INNER + 2 * STATE
    return {
        f"{block}ssm_in.weight": random_weights(random, INNER + mixed + VALUE_HEADS, SIZE),
        f"{block}ssm_conv1d.weight": random_weights(random, mixed, KERNEL),
        f"{block}ssm_conv1d.bias": np.zeros(mixed, np.float32),
        f"{block}ssm_dt.bias": ones(VALUE_HEADS),
        f"{block}ssm_a": -np.ones((VALUE_HEADS, 1), np.float32),
        f"{block}ssm_d": np.ones((VALUE_HEADS, 1), np.float32),
        f"{block}ssm_norm.weight": np.ones((1, INNER), np.float32),
        f"{block}ssm_out.weight": random_weights(random, SIZE, INNER),
    }


def _indexer(random: np.random.Generator, block: str) -> Tensors:
    return {
        f"{block}indexer.k_norm.weight": ones(INDEX),
        f"{block}indexer.k_norm.bias": np.zeros(INDEX, np.float32),
        f"{block}indexer.proj.weight": random_weights(random, 2, SIZE),
        f"{block}indexer.attn_k.weight": random_weights(random, INDEX, SIZE),
        f"{block}indexer.attn_q_b.weight": random_weights(random, 2 * INDEX, QUERY_RANK),
    }


def _latent_attention(random: np.random.Generator, block: str) -> Tensors:
    heads, kept = 2, HEAD - ROTATED
    return {
        f"{block}attn_q_a.weight": random_weights(random, QUERY_RANK, SIZE),
        f"{block}attn_q_a_norm.weight": ones(QUERY_RANK),
        f"{block}attn_q_b.weight": random_weights(random, heads * HEAD, QUERY_RANK),
        f"{block}attn_kv_a_mqa.weight": random_weights(random, KEY_RANK + ROTATED, SIZE),
        f"{block}attn_kv_a_norm.weight": ones(KEY_RANK),
        f"{block}attn_k_b.weight": random_weights(random, heads, KEY_RANK, kept),
        f"{block}attn_v_b.weight": random_weights(random, heads, HEAD, KEY_RANK),
        f"{block}attn_output.weight": random_weights(random, SIZE, heads * HEAD),
    }


def _compressed_attention(random: np.random.Generator, block: str, ratio: int) -> Tensors:
    heads = 2
    tensors = {
        f"{block}attn_sinks.weight": np.zeros(heads, np.float32),
        f"{block}attn_q_a.weight": random_weights(random, QUERY_RANK, SIZE),
        f"{block}attn_q_a_norm.weight": ones(QUERY_RANK),
        f"{block}attn_q_b.weight": random_weights(random, heads * HEAD, QUERY_RANK),
        f"{block}attn_kv.weight": random_weights(random, HEAD, SIZE),
        f"{block}attn_kv_a_norm.weight": ones(HEAD),
        f"{block}attn_output_a.weight": random_weights(random, GROUPS * OUTPUT_RANK, heads * HEAD // GROUPS),
        f"{block}attn_output_b.weight": random_weights(random, SIZE, GROUPS * OUTPUT_RANK),
    }
    if ratio:
        tensors |= _compressor(random, f"{block}attn_compressor_", HEAD, ratio)
    if ratio == 4:
        tensors |= _compressor(random, f"{block}indexer_compressor_", INDEX, ratio)
        tensors[f"{block}indexer.proj.weight"] = random_weights(random, 2, SIZE)
        tensors[f"{block}indexer.attn_q_b.weight"] = random_weights(random, 2 * INDEX, QUERY_RANK)
    return tensors


def _compressor(random: np.random.Generator, name: str, size: int, ratio: int) -> Tensors:
    width = 2 * size if ratio == 4 else size
    return {
        f"{name}kv.weight": random_weights(random, width, SIZE),
        f"{name}gate.weight": random_weights(random, width, SIZE),
        f"{name}ape.weight": random_weights(random, ratio, width),
        f"{name}norm.weight": ones(size),
    }


def hyper_connection(random: np.random.Generator, name: str, mixes: int, scales: int) -> Tensors:
    return {
        f"{name}fn.weight": random_weights(random, mixes, STREAMS * SIZE),
        f"{name}base.weight": np.zeros(mixes, np.float32),
        f"{name}scale.weight": ones(scales),
    }


def predictor(random: np.random.Generator, layer: int) -> Tensors:
    """Return the tensors that combine an embedding and a hidden state.

    The embedding passes through almost unchanged, so that a random layer is sometimes right.
    """
    block = f"blk.{layer}.nextn."
    joined = [np.eye(SIZE, dtype=np.float32), random_weights(random, SIZE, SIZE) * 0.1]
    norms = ("enorm", "hnorm", "shared_head_norm")
    return {
        f"{block}eh_proj.weight": np.concatenate(joined, axis=1),
        **{f"{block}{norm}.weight": ones(SIZE) for norm in norms},
    }
