"""A pass of a DFlash or DSpark head in NumPy, following the papers and the published code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EPSILON, HEAD_SIZE = 1e-5, 16
ROPE_BASE = 10000.0


# Published tensor names of layers, keyed by their GGUF names.
_PUBLISHED = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "enc.output_norm": "hidden_norm", "output_norm": "norm", "output": "lm_head",
    "markov_w1": "markov_head.markov_w1", "markov_w2": "markov_head.markov_w2",
}  # fmt: skip


def published_tensors(path: Path) -> dict[str, Array]:
    """Return the tensors of a head's F16 or F32 GGUF file, keyed by their published names."""
    tensors = {}
    for name, tensor in tensors_of(path).items():
        layer, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*?)(?:\.weight)?", name).groups()  # type: ignore[union-attr]
        prefix = "" if layer is None else f"layers.{layer}."
        tensors[f"{prefix}{_PUBLISHED.get(part, part)}.weight"] = tensor
    return tensors


def tensors_of(path: Path) -> dict[str, Array]:
    """The tensors of a GGUF file in F16 or F32."""
    return {tensor.name: np.asarray(tensor.data, np.float64) for tensor in gguf.GGUFReader(path).tensors}


def norm(states: Array, weight: Array) -> Array:
    scales: Array = 1 / np.sqrt((states**2).mean(axis=-1, keepdims=True) + EPSILON)
    return states * scales * weight


def rotated(states: Array, positions: NDArray[np.int64], base: float) -> Array:
    """Rotate each value together with the value half a head further on."""
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
    **options: Any,
) -> Array:
    """Return the logits of all tokens in a block, before the Markov head. `output` is the output matrix."""
    logits: Array = block_states(head, embeddings, states, block, **options) @ output.T
    return logits


def convolved(states: Array, inputs: Array, head: Mapping[str, Array], name: str, side: int) -> Array:
    """Apply a DFlash 2 head's convolution over neighbouring tokens, if the head has one.

    Args:
        states: The values to convolve.
        inputs: The input of the layer's attention or feed-forward block, which determines the weights.
        head: The head's tensors.
        name: The name of the convolution's tensors, without `_base` or `_proj`.
        side: 0 before the block, 1 after it.
    """
    if f"{name}_base.weight" not in head:
        return states
    base = head[f"{name}_base.weight"][side]
    dynamic = (inputs @ head[f"{name}_proj.weight"].T).reshape(len(inputs), 2, len(base), -1)[:, side]
    weights = base + dynamic.repeat(base.shape[1] // dynamic.shape[2], axis=2)
    before = [np.pad(states, ((tap, 0), (0, 0)))[: len(states)] for tap in range(len(base))]
    result: Array = (weights * np.stack(before, axis=1)).sum(axis=1)
    return result


def pair_scores(head: Mapping[str, Array], state: Array, before: int, tokens: NDArray[np.int64]) -> Array:
    """Return the scores that a DFlash 2 head's path selector adds to the logits of tokens after `before`."""
    gated = head["selector_predecessor.weight"][before] * (head["selector_hidden.weight"] @ state)
    scores: Array = head["selector_successor.weight"][tokens] @ gated
    return scores


def block_states(
    head: Mapping[str, Array],
    embeddings: Array,
    states: Array,
    block: Sequence[int],
    *,
    start: int = 0,
    base: float = ROPE_BASE,
    causal: bool = False,
    window: int = 0,
) -> Array:
    """Return the normalised hidden states of all tokens in a block.

    Args:
        head: The head's tensors, keyed by their published names.
        embeddings: The target's token embeddings.
        states: The target's hidden states for the text before the block.
        block: The block's tokens.
        start: Position of the first hidden state.
        base: The RoPE frequency base.
        causal: Whether a token of the block attends only to earlier ones.
        window: The size of the sliding window of all layers except the first, or 0.
    """
    context = norm(states @ head["fc.weight"].T, head["hidden_norm.weight"])
    hidden = embeddings[list(block)]
    positions = np.arange(start, start + len(states) + len(block), dtype=np.int64)
    own = positions[len(states) :]
    layers = sum(name.endswith("q_proj.weight") for name in head)
    for layer in range(layers):

        def of(name: str, layer: int = layer) -> Array:
            return head[f"layers.{layer}.{name}.weight"]

        def split(values: Array) -> Array:
            return values.reshape(len(values), -1, HEAD_SIZE)

        part = norm(hidden, of("input_layernorm"))
        normed = convolved(part, part, head, f"layers.{layer}.attn_conv", 0)
        both = np.concatenate([context, normed])
        queries = rotated(norm(split(normed @ of("self_attn.q_proj").T), of("self_attn.q_norm")), own, base)
        keys = rotated(norm(split(both @ of("self_attn.k_proj").T), of("self_attn.k_norm")), positions, base)
        values = split(both @ of("self_attn.v_proj").T)
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
        attended = np.concatenate(mixed, axis=1) @ of("self_attn.o_proj").T
        hidden = hidden + convolved(attended, part, head, f"layers.{layer}.attn_conv", 1)
        part = norm(hidden, of("post_attention_layernorm"))
        normed = convolved(part, part, head, f"layers.{layer}.ffn_conv", 0)
        gate = normed @ of("mlp.gate_proj").T
        fed = (gate / (1 + np.exp(-gate)) * (normed @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
        hidden = hidden + convolved(fed, part, head, f"layers.{layer}.ffn_conv", 1)
    return norm(hidden, head["norm.weight"])


def markov_logits(head: Mapping[str, Array], token: int) -> Array:
    """Return the logits that a DSpark head's Markov head adds after a token."""
    logits: Array = head["markov_head.markov_w2.weight"] @ head["markov_head.markov_w1.weight"][token]
    return logits
