"""Gemma 4 and its assistants in NumPy, to check the backend's results with tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

__all__ = ["GemmaReference"]

Array = NDArray[np.float64]


class _File:
    """The tensors and metadata of a GGUF file."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.tensors = {each.name: np.array(each.data, np.float64) for each in reader.tensors}
        prefix = reader.fields["general.architecture"].contents() + "."
        self.values: dict[str, Any] = {
            name.removeprefix(prefix): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(prefix)
        }

    def normed(self, values: Array, name: str) -> Array:
        return _normed(values) * self.tensors[f"{name}.weight"]

    def rotated(self, heads: Array, positions: Sequence[int], is_windowed: bool) -> Array:
        """Apply RoPE to heads [tokens, heads, size]."""
        half = heads.shape[-1] // 2
        base = self.values["rope.freq_base_swa" if is_windowed else "rope.freq_base"]
        factors = np.ones(half) if is_windowed else self.tensors["rope_freqs.weight"]
        angles = np.outer(positions, base ** (-np.arange(half) / half) / factors)[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return np.concatenate(
            [
                first * np.cos(angles) - second * np.sin(angles),
                first * np.sin(angles) + second * np.cos(angles),
            ],
            axis=-1,
        )

    def heads(self, values: Array, layer: int, part: str, is_windowed: bool) -> Array:
        suffix = "_swa" if is_windowed else ""
        product = values @ self.tensors[f"blk.{layer}.attn_{part}.weight"].T
        return product.reshape(len(values), -1, self.values[f"attention.key_length{suffix}"])

    def layer(
        self,
        values: Array,
        layer: int,
        positions: Sequence[int],
        keys: Array,
        cached: Array,
        is_windowed: bool,
    ) -> Array:
        """Run a layer whose queries attend to all keys and values, starting at position 0."""
        block = f"blk.{layer}."
        queries = self.heads(self.normed(values, f"{block}attn_norm"), layer, "q", is_windowed)
        queries = self.rotated(_normed(queries), positions, is_windowed)
        window = self.values["attention.sliding_window"] if is_windowed else 1 << 30
        attended = self._attention(queries, positions, keys, cached, window)
        values = values + self.normed(
            attended @ self.tensors[f"{block}attn_output.weight"].T, f"{block}post_attention_norm"
        )
        inputs = self.normed(values, f"{block}ffn_norm")
        gate, up = (inputs @ self.tensors[f"{block}ffn_{part}.weight"].T for part in ("gate", "up"))
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        down = (gate * up) @ self.tensors[f"{block}ffn_down.weight"].T
        result: Array = values + self.normed(down, f"{block}post_ffw_norm")
        return result

    def _attention(
        self, queries: Array, positions: Sequence[int], keys: Array, cached: Array, window: int
    ) -> Array:
        repeats = queries.shape[1] // keys.shape[1]
        keys, cached = (np.repeat(each, repeats, axis=1) for each in (keys, cached))
        scores = np.einsum("qhd,khd->hqk", queries, keys)
        distance = np.array(positions)[:, None] - np.arange(len(keys))
        scores[:, (distance < 0) | (distance >= window)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended: Array = np.einsum("hqk,khd->qhd", weights, cached)
        return attended.reshape(len(queries), -1)


def _normed(values: Array) -> Array:
    squares: Array = (values**2).mean(axis=-1, keepdims=True)
    return values / np.sqrt(squares + 1e-6)


class GemmaReference:
    """A target and its head, after the target has processed some tokens."""

    def __init__(self, target: Path, head: Path, tokens: Sequence[int]) -> None:
        self._target, self._head = _File(target), _File(head)
        self._position = len(tokens)
        self._last: dict[bool, tuple[Array, Array]] = {}
        positions = range(len(tokens))
        values_of = self._target.values
        own_layers = values_of["block_count"] - values_of["attention.shared_kv_layers"]
        values = self._embedded(tokens)
        for layer, is_windowed in enumerate(values_of["attention.sliding_window_pattern"]):
            file, inputs = self._target, self._target.normed(values, f"blk.{layer}.attn_norm")
            if layer < own_layers:
                keys, cached = (_normed(file.heads(inputs, layer, part, is_windowed)) for part in "kv")
                self._last[is_windowed] = file.rotated(keys, positions, is_windowed), cached
            values = file.layer(values, layer, positions, *self._last[is_windowed], is_windowed)
        self.state: Array = self._target.normed(values, "output_norm")[-1]

    def _embedded(self, tokens: Sequence[int]) -> Array:
        rows: Array = self._target.tensors["token_embd.weight"][list(tokens)]
        return rows * float(np.sqrt(rows.shape[-1]))

    def draft_step(self, token: int, state: Array) -> tuple[Array, Array]:
        """Return the head's logits after a token, and its hidden state for the next step."""
        tensors = self._head.tensors
        inputs = np.concatenate([self._embedded([token])[0], state])[None]
        values = inputs @ tensors["nextn.pre_projection.weight"].T
        for layer, is_windowed in enumerate(self._head.values["attention.sliding_window_pattern"]):
            values = self._head.layer(values, layer, [self._position], *self._last[is_windowed], is_windowed)
        normed = self._head.normed(values, "output_norm")[0]
        return normed @ tensors["token_embd.weight"].T, normed @ tensors["nextn.post_projection.weight"].T
