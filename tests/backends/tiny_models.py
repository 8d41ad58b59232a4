"""Tiny GGUF files with random weights, for behaviour that trained models rarely show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

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
    Tensors,
    add_vocabulary,
    attention,
    ends,
    finish,
    norms_and_feed_forward,
    ones,
    open_writer,
    random_weights,
)

__all__ = [
    "CHATML",
    "WORDS",
    "write_deci",
    "write_gemma2",
    "write_gemma3",
    "write_jamba",
    "write_lfm2",
    "write_llama",
    "write_mamba",
    "write_moe",
    "write_qwen2vl",
]

# Sizes of a recurrent state and of its time step.
_STATE, _RANK = 8, 4


def write_llama(
    path: Path,
    *,
    words: tuple[str, ...] = WORDS,
    template: str | None = CHATML,
    seed: int = 0,
    architecture: str = "llama",
    context: int = 512,
    layers: int = 1,
    feed_forward: int = FEED_FORWARD,
    long_from: int = 0,
    pooling: gguf.PoolingType | None = None,
    twins: bool = False,
    sampling: Mapping[str, float] = MappingProxyType({}),
    general: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write a transformer.

    Args:
        long_from: Use LongRoPE, with other factors in contexts above this size.
        pooling: Pooling method for embeddings, after adding the EOS token.
        twins: Give tokens 4 and 5, 6 and 7 and so on nearly equal logits, which differ by less than their
            rounding errors.
        sampling: Recommended settings, such as `temp`.
        general: Other `general` keys, such as `basename`.
    """
    random = np.random.default_rng(seed)
    writer = open_writer(path, architecture, layers=layers, feed_forward=feed_forward, context=context)
    for name, text in general.items():
        writer.add_string(f"general.{name}", text)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    vocab = add_vocabulary(writer, words, template)
    tensors = ends(random, vocab)
    if twins:
        output = tensors["output.weight"]
        output[5::2] = np.nextafter(output[4:-1:2], np.float32(np.inf))
    for layer in range(layers):
        tensors |= attention(random, layer, heads_kv=2) | norms_and_feed_forward(random, layer, feed_forward)
    for name, value in sampling.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)  # type: ignore[arg-type]
    if pooling is not None:
        writer.add_pooling_type(pooling)
        writer.add_add_eos_token(True)
    if long_from:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(long_from)
        for name, factor in (("short", 1.0), ("long", 4.0)):
            tensors[f"rope_factors_{name}.weight"] = np.full(HEAD // 2, factor, np.float32)
    finish(writer, tensors)
    return path


def write_deci(path: Path, *, layers: int, without_feed_forward: int, seed: int = 0) -> Path:
    """Write a transformer in which one layer has no feed-forward block."""
    random = np.random.default_rng(seed)
    sizes = [0 if layer == without_feed_forward else FEED_FORWARD for layer in range(layers)]
    writer = open_writer(path, "deci", layers=layers, feed_forward=sizes)
    writer.add_head_count([2] * layers)
    writer.add_head_count_kv([2] * layers)
    tensors = ends(random, add_vocabulary(writer, WORDS, CHATML))
    for layer in range(layers):
        tensors |= attention(random, layer, heads_kv=2)
        block = norms_and_feed_forward(random, layer)
        is_without = layer == without_feed_forward
        tensors |= {name: block[name] for name in block if not is_without or "attn" in name}
    finish(writer, tensors)
    return path


def write_moe(
    path: Path,
    *,
    template: str | None = CHATML,
    seed: int = 0,
    layers: int = 2,
    experts: int = EXPERTS,
    feed_forward: int = FEED_FORWARD,
) -> Path:
    """Write a mixture of experts: two experts per token, and two heads that share their keys."""
    random = np.random.default_rng(seed)
    writer = open_writer(path, "llama", layers=layers, feed_forward=feed_forward)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    vocab = add_vocabulary(writer, WORDS, template)
    tensors = ends(random, vocab)
    for layer in range(layers):
        tensors |= attention(random, layer)
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ones(SIZE),
            f"blk.{layer}.ffn_norm.weight": ones(SIZE),
            f"blk.{layer}.ffn_gate_inp.weight": random_weights(random, experts, SIZE),
            f"blk.{layer}.ffn_gate_exps.weight": random_weights(random, experts, feed_forward, SIZE),
            f"blk.{layer}.ffn_up_exps.weight": random_weights(random, experts, feed_forward, SIZE),
            f"blk.{layer}.ffn_down_exps.weight": random_weights(random, experts, SIZE, feed_forward),
        }
    finish(writer, tensors)
    return path


def write_mamba(
    path: Path,
    *,
    template: str | None = CHATML,
    seed: int = 0,
    layers: int = 1,
    architecture: str = "mamba",
) -> Path:
    """Write a recurrent model, whose state cannot be truncated."""
    random = np.random.default_rng(seed)
    writer = open_writer(path, architecture, layers=layers, feed_forward=0)
    writer.add_head_count(0)
    _add_state_sizes(writer)
    vocab = add_vocabulary(writer, WORDS, template)
    tensors = ends(random, vocab)
    for layer in range(layers):
        tensors |= {f"blk.{layer}.attn_norm.weight": ones(SIZE)} | _state_space(random, layer)
    finish(writer, tensors)
    return path


def write_gemma2(path: Path, *, template: str | None = CHATML, seed: int = 0, window: int = 16) -> Path:
    """Write a transformer of two layers, the first with a sliding window."""
    return _write_gemma(path, "gemma2", template, seed, window, layers=2)


def write_gemma3(
    path: Path,
    *,
    template: str | None = CHATML,
    seed: int = 0,
    window: int = 16,
    words: tuple[str, ...] = WORDS,
) -> Path:
    """Write a transformer of eight layers, all but the sixth with a sliding window."""
    return _write_gemma(path, "gemma3", template, seed, window, layers=8, words=words)


def write_qwen2vl(path: Path, *, seed: int, words: tuple[str, ...], layers: int, context: int = 1024) -> Path:
    """Write a transformer whose tokens have positions for time, row and column (M-RoPE)."""
    random = np.random.default_rng(seed)
    writer = open_writer(path, "qwen2vl", layers=layers, context=context)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_sections([2, 3, 3, 0])
    tensors = ends(random, add_vocabulary(writer, words, CHATML))
    for layer in range(layers):
        tensors |= attention(random, layer, heads_kv=2) | norms_and_feed_forward(random, layer)
        sizes = {"q": 2 * HEAD, "k": 2 * HEAD, "v": 2 * HEAD}
        tensors |= {f"blk.{layer}.attn_{part}.bias": 0 * ones(size) for part, size in sizes.items()}
    finish(writer, tensors)
    return path


def _write_gemma(
    path: Path,
    architecture: str,
    template: str | None,
    seed: int,
    window: int,
    layers: int,
    words: tuple[str, ...] = WORDS,
) -> Path:
    random = np.random.default_rng(seed)
    writer = open_writer(path, architecture, layers=layers)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_sliding_window(window)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    vocab = add_vocabulary(writer, words, template)
    # The embedding is tied to the output. Without a large norm, the model would only repeat its input token.
    loud = 20 * ones(SIZE)
    tensors = {"token_embd.weight": random_weights(random, vocab, SIZE) * 4, "output_norm.weight": ones(SIZE)}
    for layer in range(layers):
        tensors |= attention(random, layer) | norms_and_feed_forward(random, layer)
        tensors |= {
            f"blk.{layer}.post_attention_norm.weight": loud,
            f"blk.{layer}.post_ffw_norm.weight": loud,
        }
        if architecture == "gemma3":
            norms = (f"blk.{layer}.attn_{part}_norm.weight" for part in "qk")
            tensors |= dict.fromkeys(norms, ones(HEAD))
    finish(writer, tensors)
    return path


def write_jamba(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """Write a hybrid of a recurrent layer and an attention layer."""
    random = np.random.default_rng(seed)
    writer = open_writer(path, "jamba", layers=2)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 1])
    _add_state_sizes(writer)
    vocab = add_vocabulary(writer, WORDS, template)
    tensors = ends(random, vocab) | _state_space(random, 0) | attention(random, 1)
    tensors |= {
        "blk.0.ssm_dt_norm.weight": ones(_RANK),
        "blk.0.ssm_b_norm.weight": ones(_STATE),
        "blk.0.ssm_c_norm.weight": ones(_STATE),
    }
    for layer in range(2):
        tensors |= norms_and_feed_forward(random, layer)
    finish(writer, tensors)
    return path


def write_lfm2(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """Write a hybrid of a short convolution and attention. llama.cpp can keep several of its small states."""
    random = np.random.default_rng(seed)
    writer = open_writer(path, "lfm2", layers=2)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 1])
    writer.add_shortconv_l_cache(3)
    vocab = add_vocabulary(writer, WORDS, template)
    tensors = ends(random, vocab, norm="token_embd_norm")
    tensors |= {
        "blk.0.shortconv.conv.weight": random_weights(random, SIZE, 3),
        "blk.0.shortconv.in_proj.weight": random_weights(random, 3 * SIZE, SIZE),
        "blk.0.shortconv.out_proj.weight": random_weights(random, SIZE, SIZE),
        "blk.1.attn_q_norm.weight": ones(HEAD),
        "blk.1.attn_k_norm.weight": ones(HEAD),
    }
    tensors |= attention(random, 1)
    for layer in range(2):
        tensors |= norms_and_feed_forward(random, layer)
    finish(writer, tensors)
    return path


def _add_state_sizes(writer: gguf.GGUFWriter) -> None:
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_RANK)


def _state_space(random: np.random.Generator, layer: int) -> Tensors:
    """Return the tensors of a Mamba mixer, without the norm."""
    return {
        f"blk.{layer}.ssm_in.weight": random_weights(random, 2 * INNER, SIZE),
        f"blk.{layer}.ssm_conv1d.weight": random_weights(random, INNER, KERNEL),
        f"blk.{layer}.ssm_conv1d.bias": np.zeros(INNER, np.float32),
        f"blk.{layer}.ssm_x.weight": random_weights(random, _RANK + 2 * _STATE, INNER),
        f"blk.{layer}.ssm_dt.weight": random_weights(random, INNER, _RANK),
        f"blk.{layer}.ssm_dt.bias": ones(INNER),
        f"blk.{layer}.ssm_a": -np.ones((INNER, _STATE), np.float32),
        f"blk.{layer}.ssm_d": ones(INNER),
        f"blk.{layer}.ssm_out.weight": random_weights(random, SIZE, INNER),
    }
