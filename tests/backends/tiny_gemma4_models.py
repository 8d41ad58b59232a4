"""Tiny GGUF files: a random Gemma 4 model, and a random head that shares its KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.backends.tiny_gguf import (
    CHATML,
    FEED_FORWARD,
    SIZE,
    WORDS,
    Tensors,
    add_vocabulary,
    finish,
    ones,
    random_weights,
)

__all__ = ["WINDOW", "Gemma4Shape", "write_gemma4", "write_gemma4_assistant"]

WINDOW = 16
# The hidden size of the head. It differs from the target's.
_HEAD_SIZE = 16


class Gemma4Shape(NamedTuple):
    """Sizes that the head must share with its target.

    Attributes:
        size: The target's hidden size.
        words: The tokens of the vocabulary that are not bytes.
        full, windowed: Number of KV heads and head size of layers with full attention, and of layers with a
            sliding window.
        shared_layers: Number of the target's last layers that use the keys and values of earlier layers.
    """

    size: int = SIZE
    words: tuple[str, ...] = WORDS
    full: tuple[int, int] = (1, 32)
    windowed: tuple[int, int] = (2, 16)
    shared_layers: int = 0

    def of_layer(self, is_windowed: bool) -> tuple[int, int]:
        return self.windowed if is_windowed else self.full


def write_gemma4(path: Path, shape: Gemma4Shape | None = None, *, seed: int = 0, **changes: Any) -> Path:
    """Write a model of four layers. Every second layer has a sliding window.

    `changes` overrides metadata values of the architecture.
    """
    shape = shape or Gemma4Shape()
    random, windowed = np.random.default_rng(seed), [True, False, True, False]
    writer, vocab = _open(path, "gemma4", shape, windowed, shape.size, changes)
    tensors: Tensors = {
        "token_embd.weight": random_weights(random, vocab, shape.size) * 4,
        "output_norm.weight": ones(shape.size),
        # The rank is that of the head's output, so the logits can be almost the same.
        "output.weight": _head_output(vocab) @ _to_head(shape.size),
    }
    tensors |= _rope_factors(shape)
    for layer, is_windowed in enumerate(windowed):
        tensors |= _layer(random, layer, shape, shape.size, is_windowed)
        heads, size = shape.of_layer(is_windowed)
        for part in "kv":
            tensors[f"blk.{layer}.attn_{part}.weight"] = random_weights(random, heads * size, shape.size)
        tensors[f"blk.{layer}.attn_k_norm.weight"] = ones(size)
    finish(writer, tensors)
    return path


def write_gemma4_assistant(
    path: Path,
    shape: Gemma4Shape | None = None,
    *,
    seed: int = 1,
    windowed: tuple[bool, ...] = (True, True, False),
    head_size: int = _HEAD_SIZE,
    without: str = "",
    **changes: Any,
) -> Path:
    """Write a head for a model of the same shape.

    Args:
        windowed: Which of its layers have a sliding window.
        without: Name suffix of a tensor to leave out.
        changes: Metadata values of the architecture to override.
    """
    shape = shape or Gemma4Shape()
    random = np.random.default_rng(seed)
    changes = {"embedding_length_out": shape.size, "nextn_predict_layers": len(windowed), **changes}
    writer, vocab = _open(path, "gemma4-assistant", shape, windowed, head_size, changes)
    tensors: Tensors = {
        "token_embd.weight": np.resize(_head_output(vocab), (vocab, head_size)),
        "output_norm.weight": ones(head_size),
        # The embedding passes through almost unchanged, so that the head is sometimes right.
        "nextn.pre_projection.weight": np.concatenate(
            [
                np.resize(_to_head(shape.size), (head_size, shape.size)),
                random_weights(random, head_size, shape.size),
            ],
            axis=1,
        ),
        "nextn.post_projection.weight": random_weights(random, shape.size, head_size),
    }
    tensors |= _rope_factors(shape)
    for layer, is_windowed in enumerate(windowed):
        tensors |= _layer(random, layer, shape, head_size, is_windowed)
    finish(
        writer, {name: tensor for name, tensor in tensors.items() if not (without and name.endswith(without))}
    )
    return path


def _open(
    path: Path,
    architecture: str,
    shape: Gemma4Shape,
    windowed: Any,
    size: int,
    changes: dict[str, Any],
) -> tuple[gguf.GGUFWriter, int]:
    """Return a writer with metadata, and the size of the vocabulary."""
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": size,
        "embedding_length_per_layer_input": 0,
        "block_count": len(windowed),
        "feed_forward_length": FEED_FORWARD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.head_count": 2,
        "attention.head_count_kv": [shape.of_layer(each)[0] for each in windowed],
        "attention.key_length": shape.full[1],
        "attention.value_length": shape.full[1],
        "attention.key_length_swa": shape.windowed[1],
        "attention.value_length_swa": shape.windowed[1],
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": list(windowed),
        "attention.shared_kv_layers": shape.shared_layers,
        "rope.dimension_count": shape.full[1],
        "rope.dimension_count_swa": shape.windowed[1],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    for key, value in (values | changes).items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    return writer, add_vocabulary(writer, shape.words, CHATML)


def _layer(
    random: np.random.Generator, layer: int, shape: Gemma4Shape, size: int, is_windowed: bool
) -> Tensors:
    """Return the tensors of a layer of the model or the head, except keys and values."""
    block, head = f"blk.{layer}.", shape.of_layer(is_windowed)[1]
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    return {
        **{f"{block}{norm}.weight": ones(size) for norm in norms},
        f"{block}attn_q.weight": random_weights(random, 2 * head, size),
        f"{block}attn_q_norm.weight": ones(head),
        f"{block}attn_output.weight": random_weights(random, size, 2 * head),
        f"{block}ffn_gate.weight": random_weights(random, FEED_FORWARD, size),
        f"{block}ffn_up.weight": random_weights(random, FEED_FORWARD, size),
        f"{block}ffn_down.weight": random_weights(random, size, FEED_FORWARD),
        # Layers add little to their input, so that the next token depends mostly on the last one.
        f"{block}layer_output_scale.weight": ones(1),
    }


def _rope_factors(shape: Gemma4Shape) -> Tensors:
    half = shape.full[1] // 2
    # Only a part of each head is rotated, as in published models.
    factors = [1.0] * (half // 4) + [1e30] * (half - half // 4)
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _head_output(vocab: int) -> np.ndarray:
    return random_weights(np.random.default_rng(100), vocab, _HEAD_SIZE) * 4


def _to_head(size: int) -> np.ndarray:
    """Return the matrix that turns hidden states of the model into those of the head."""
    return random_weights(np.random.default_rng(101), _HEAD_SIZE, size)
