"""Tiny GGUF files with random draft heads for the models of `tiny_models.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.backends.tiny_gguf import (
    FEED_FORWARD,
    HEAD,
    SIZE,
    WORDS,
    Tensors,
    attention,
    finish,
    norms_and_feed_forward,
    ones,
    open_writer,
    random_weights,
)


def write_eagle(
    path: Path,
    *,
    layers: Sequence[int] = (0, 0, 0),
    vocab: int = 259 + len(WORDS),
    size: int = SIZE,
    rotated: int = HEAD,
) -> Path:
    """Write an EAGLE-3 head for the model from `write_llama`. It drafts three quarters of the tokens."""
    random = np.random.default_rng(7)
    writer = open_writer(path, "eagle3", layers=1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(rotated)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", size)
    writer.add_bool("eagle3.norm_before_residual", False)
    writer.add_bool("eagle3.norm_before_fc", False)
    drafted = np.sort(random.permutation(vocab)[: vocab * 3 // 4])
    block = "blk.0."
    tensors = {
        "fc.weight": random_weights(random, SIZE, len(layers) * size),
        "output_norm.weight": ones(SIZE),
        "output.weight": random_weights(random, len(drafted), SIZE),
        **{f"{block}{norm}.weight": ones(SIZE) for norm in ("attn_norm", "attn_norm_2", "ffn_norm")},
        f"{block}attn_q.weight": random_weights(random, 2 * HEAD, 2 * SIZE),
        f"{block}attn_k.weight": random_weights(random, HEAD, 2 * SIZE),
        f"{block}attn_v.weight": random_weights(random, HEAD, 2 * SIZE),
        f"{block}attn_output.weight": random_weights(random, SIZE, 2 * HEAD),
        f"{block}ffn_gate.weight": random_weights(random, FEED_FORWARD, SIZE),
        f"{block}ffn_up.weight": random_weights(random, FEED_FORWARD, SIZE),
        f"{block}ffn_down.weight": random_weights(random, SIZE, FEED_FORWARD),
    }
    writer.add_tensor("d2t", drafted.astype(np.int64))
    finish(writer, tensors)
    return path


def write_dflash(
    path: Path,
    *,
    layers: Sequence[int] = (1, 1, 1),
    depth: int = 2,
    block: int = 6,
    vocab: int = 259 + len(WORDS),
    mask: int | None = 0,
    drafted: int | None = None,
    size: int = SIZE,
    rank: int = 0,
    candidates: int = 0,
    sections: Sequence[int] = (),
    window: int = 0,
    kv_heads: int = 1,
    value_size: int = HEAD,
    **metadata: int | bool | str,
) -> Path:
    """Write a DFlash head for the model from `write_llama`.

    Args:
        depth: Number of layers.
        drafted: Number of tokens in the draft vocabulary.
        rank: Rank of the Markov head, which makes it a DSpark head.
        candidates: Number of candidates of a DFlash 2 head.
        sections: Whether it has M-RoPE.
        window: Whether all layers except the first have a sliding window.
        metadata: Additional values for its architecture, such as `sample_from_anchor`.
    """
    random = np.random.default_rng(9)
    writer = open_writer(path, "dflash", layers=depth)
    writer.add_head_count(2)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD)
    writer.add_value_length(value_size)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    writer.add_array("dflash.target_layers", list(layers))
    writer.add_uint32("dflash.block_size", block)
    if mask is not None:
        writer.add_mask_token_id(mask)
    if sections:
        writer.add_rope_dimension_sections(sections)
    if window:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([False, *[True] * (depth - 1)])
    for key, value in metadata.items():
        name = f"dflash.{key.replace('__', '.')}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    tensors = {
        "fc.weight": random_weights(random, SIZE, len(layers) * size),
        "enc.output_norm.weight": ones(SIZE),
        "output_norm.weight": ones(SIZE),
    }
    for layer in range(depth):
        tensors |= attention(random, layer, kv_heads) | norms_and_feed_forward(random, layer)
        if value_size != HEAD:
            tensors[f"blk.{layer}.attn_v.weight"] = random_weights(random, kv_heads * value_size, SIZE)
        norms = (f"blk.{layer}.attn_{part}_norm.weight" for part in "qk")
        tensors |= dict.fromkeys(norms, ones(HEAD))
    if candidates:
        tensors |= _path_selector(random, vocab, depth)
        for key, value in {"selector_rank": 8, "conv_kernel_size": 2, "conv_group_size": SIZE // 4}.items():
            writer.add_uint32(f"dflash.{key}", value)
        writer.add_uint32("dflash.selector_top_k", candidates)
    if rank:
        tensors |= {
            "markov_w1.weight": random_weights(random, vocab, rank),
            "markov_w2.weight": 8 * random_weights(random, drafted or vocab, rank),
            "conf_proj.weight": random_weights(random, 1, SIZE + rank),
        }
    if drafted:
        tensors["output.weight"] = 4 * random_weights(random, drafted, SIZE)
        ids = np.sort(random.permutation(vocab)[:drafted])
        writer.add_tensor("d2t", ids.astype(np.int64))
    finish(writer, tensors)
    return path


def _path_selector(random: np.random.Generator, vocab: int, depth: int) -> Tensors:
    """Return what a DFlash 2 head adds: the path selector, and convolutions around each layer's blocks."""
    tensors = {
        "selector_hidden.weight": random_weights(random, 8, SIZE),
        "selector_predecessor.weight": 8 * random_weights(random, vocab, 8),
        "selector_successor.weight": random_weights(random, vocab, 8),
    }
    for layer in range(depth):
        for part in ("attn", "ffn"):
            base = np.array([0.7, 0.3], np.float32)[None, :, None]
            noise = 0.1 * random.normal(size=(2, 2, SIZE)).astype(np.float32)
            tensors[f"blk.{layer}.{part}_conv_base"] = base + noise
            tensors[f"blk.{layer}.{part}_conv_proj.weight"] = 0.3 * random_weights(random, 2 * 2 * 4, SIZE)
    return tensors
