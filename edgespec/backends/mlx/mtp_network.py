"""The networks of multi-token prediction (MTP) modules (arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize

from edgespec.backends.mlx.attention_cache import AttentionCache

__all__ = ["MtpChain", "MtpModule", "quantize_like"]

# Quantisation formats without biases, by bits per weight and group size.
_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}


class MtpModule(Module):
    """An MTP module, which predicts the next token from a token and the preceding hidden state.

    Args:
        layers: Layers with the architecture of the target's full-attention layers, without weights. They run
            one after another.
        size: Size of hidden states.
        norm_eps: Epsilon of the norms.
        post_norm: Whether the module's hidden state is normalised before it is fed back, like the target's.
        hidden_first: Whether `fc` reads the hidden state before the embedding.
    """

    def __init__(
        self, layers: Sequence[Any], size: int, norm_eps: float, post_norm: bool, hidden_first: bool
    ) -> None:
        super().__init__()
        self._post_norm, self._hidden_first = post_norm, hidden_first
        self.pre_fc_norm_embedding = RMSNorm(size, norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(size, norm_eps)
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = list(layers)
        self.norm = RMSNorm(size, norm_eps)

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    @property
    def cache_count(self) -> int:
        return len(self.layers)

    def reduced(self, states: mx.array) -> mx.array:
        return states

    def __call__(self, embeddings: mx.array, states: mx.array, caches: Sequence[AttentionCache]) -> mx.array:
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)]
        if self._hidden_first:
            pair.reverse()
        outputs: mx.array = self.fc(mx.concatenate(pair, axis=-1))[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            # Pass the mask as an array, because multi-head latent attention does not accept the string
            # "causal".
            mask = cache.make_mask(outputs.shape[1], return_array=True)
            outputs = layer(outputs, mask, cache)
        return outputs[0]

    def normalised(self, states: mx.array) -> mx.array:
        return self.norm(states)

    def fed_back(self, states: mx.array) -> mx.array:
        return self.norm(states) if self._post_norm else states


class MtpChain(Module):
    """A chain of MTP modules. Each was trained to predict one token further ahead than the preceding module.

    Each module has one layer. Only the selected module runs.
    """

    def __init__(self, modules: Sequence[MtpModule]) -> None:
        super().__init__()
        self.steps = list(modules)
        self._step = 0

    def select(self, step: int) -> None:
        """Select the module with this index, or the last module if there are fewer."""
        self._step = min(step, len(self.steps) - 1)

    @property
    def step(self) -> int:
        """Index of the selected module."""
        return self._step

    @property
    def dtype(self) -> mx.Dtype:
        return self.steps[0].dtype

    @property
    def cache_count(self) -> int:
        return len(self.steps)

    def reduced(self, states: mx.array) -> mx.array:
        return states

    def __call__(self, embeddings: mx.array, states: mx.array, caches: Sequence[AttentionCache]) -> mx.array:
        return self.steps[self._step](embeddings, states, [caches[self._step]])

    def normalised(self, states: mx.array) -> mx.array:
        return self.steps[self._step].normalised(states)

    def fed_back(self, states: mx.array) -> mx.array:
        return self.steps[self._step].fed_back(states)


def quantize_like(network: Module, weights: Mapping[str, mx.array]) -> None:
    """Quantise the layers of a network whose stored weights are quantised.

    The bits per weight and the group size are computed from the shapes of the weights, because files describe
    them in different ways.

    Raises:
        KeyError: A weight is missing, or its quantisation is unknown.
    """

    def settings(path: str, layer: Any) -> bool | dict[str, Any]:
        scales = weights.get(f"{path}.scales")
        if scales is None:
            return False
        columns: int = layer.weight.shape[-1]
        bits = 32 * weights[f"{path}.weight"].shape[-1] // columns
        group_size = columns // max(1, scales.shape[-1])
        mode = "affine" if f"{path}.biases" in weights else _MODES[bits, group_size]
        return {"bits": bits, "group_size": group_size, "mode": mode}

    quantize(network, class_predicate=settings)
