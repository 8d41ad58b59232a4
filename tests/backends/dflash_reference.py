"""A pass of a DFlash or DSpark head in NumPy, written from the papers and from the published code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EPSILON, HEAD_SIZE = 1e-5, 16
ROPE_BASE = 10000.0


def tensors_of(path: Path) -> dict[str, Array]:
    """The tensors of a GGUF file with weights in F16 and F32."""
    return {tensor.name: np.asarray(tensor.data, np.float64) for tensor in gguf.GGUFReader(path).tensors}


def norm(states: Array, weight: Array) -> Array:
    return states / np.sqrt((states**2).mean(axis=-1, keepdims=True) + EPSILON) * weight


def rotated(states: Array, positions: Sequence[int], base: float) -> Array:
    """Rotate each value together with that half a head further on."""
    half = HEAD_SIZE // 2
    angles = np.outer(positions, base ** (-np.arange(half) / half))[:, None]
    first, second = states[..., :half], states[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)],
        axis=-1,
    )


def block_logits(
    head: Mapping[str, Array],
    embeddings: Array,
    output: Array,
    states: Array,
    block: Sequence[int],
    *,
    start: int = 0,
    base: float = ROPE_BASE,
    causal: bool = False,
    window: int = 0,
) -> Array:
    """The logits of all tokens in a block, before the Markov head.

    Args:
        head: The head's tensors, named as in GGUF files.
        embeddings: The target's token embeddings.
        output: The output matrix.
        states: The target's hidden states of the text before the block.
        block: The block's tokens.
        start: Position of the first hidden state.
        base: The base of the rotations.
        causal: Whether a token of the block only attends to earlier ones.
        window: The size of the sliding window of all layers but the first, or 0.
    """
    context = norm(states @ head["fc.weight"].T, head["enc.output_norm.weight"])
    hidden = embeddings[list(block)]
    positions = np.arange(start, start + len(states) + len(block))
    own = positions[len(states) :]
    layers = sum(name.endswith("attn_q.weight") for name in head)
    for layer in range(layers):

        def of(name: str, layer: int = layer) -> Array:
            return head[f"blk.{layer}.{name}.weight"]

        def split(values: Array) -> Array:
            return values.reshape(len(values), -1, HEAD_SIZE)

        normed = norm(hidden, of("attn_norm"))
        both = np.concatenate([context, normed])
        queries = rotated(norm(split(normed @ of("attn_q").T), of("attn_q_norm")), own, base)
        keys = rotated(norm(split(both @ of("attn_k").T), of("attn_k_norm")), positions, base)
        values = split(both @ of("attn_v").T)
        seen = np.ones((len(own), len(positions)), bool)
        if causal:
            seen &= positions <= own[:, None]
        if window and layer:
            seen &= own[:, None] - positions < window
        mixed = []
        for each in range(queries.shape[1]):
            shared = each * keys.shape[1] // queries.shape[1]
            scores = queries[:, each] @ keys[:, shared].T / np.sqrt(HEAD_SIZE)
            weights = np.exp(np.where(seen, scores, -np.inf) - scores.max())
            mixed.append(weights / weights.sum(axis=1, keepdims=True) @ values[:, shared])
        hidden = hidden + np.concatenate(mixed, axis=1) @ of("attn_output").T
        normed = norm(hidden, of("ffn_norm"))
        gate = normed @ of("ffn_gate").T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ of("ffn_up").T)) @ of("ffn_down").T
    logits: Array = norm(hidden, head["output_norm.weight"]) @ output.T
    return logits


def markov_logits(head: Mapping[str, Array], token: int) -> Array:
    """What the Markov head of a DSpark head adds to the logits after a token."""
    logits: Array = head["markov_w2.weight"] @ head["markov_w1.weight"][token]
    return logits
