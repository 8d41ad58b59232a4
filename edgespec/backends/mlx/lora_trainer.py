"""Train a LoRA adapter for a draft model on the target's corrections, while the model is in use.

Based on online speculative decoding (OSD, arXiv 2310.07177) and LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.tuner.lora import LoRALinear
from numpy.typing import NDArray

from edgespec.backends.mlx.attention_cache import PassLayout
from edgespec.backends.mlx.evaluation import evaluate, release_thread_state, translate_errors
from edgespec.backends.mlx.gradient_descent import Arrays, loss_and_gradients
from edgespec.backends.mlx.model_skeleton import named_arrays
from edgespec.errors import CapabilityError
from edgespec.model.drafter_training import TrainingExample

__all__ = ["AdaptedLayer", "MlxTrainer", "adapted_layers"]

# LoRA hyperparameters, set to common values for small models.
RANK = 8
_SCALE = 2.0
_LEARNING_RATE = 3e-4
_MAX_GRADIENT_NORM = 1.0


class AdaptedLayer(NamedTuple):
    """A linear layer (`parent[attribute]`), and the LoRA layer that replaces it in the adapted model."""

    name: str
    parent: Any
    attribute: str
    original: Any
    adapted: LoRALinear


class MlxTrainer:
    """A `Trainer` that adds rank-8 LoRA layers to the linear layers in a model's transformer blocks.

    While the adapter is disabled, the model uses its original layers, so its output is unchanged.
    """

    def __init__(
        self, net: Any, layout: PassLayout, model_name: str, identity: str, end_round: Callable[[], None]
    ) -> None:
        """Create a trainer with a new adapter that does not change the model's output until it is trained.

        `layout` is the model's, and `end_round` discards its uncommitted tokens before the weights change.
        """
        self.identity = identity
        self.adapted = False
        self.peak_step_bytes = 0
        self._net, self._layout = net, layout
        self._model_name, self._end_round = model_name, end_round
        self._layers = list(adapted_layers(net))
        if not self._layers:
            raise CapabilityError(
                f"LoRA layers cannot be added to {model_name}, because it has no linear layers",
                code="model_not_trainable",
            )
        self._optimiser = optimizers.Adam(learning_rate=_LEARNING_RATE)
        evaluate(*self._weights().values(), *self._optimiser_state())

    @property
    def state_bytes(self) -> int:
        # Count the adapter's weights and Adam's two moments, each of which has the same size.
        return 3 * sum(array.nbytes for array in self._weights().values())

    def set_adapted(self, enabled: bool) -> None:
        self._end_round()
        self._install(enabled)

    def _install(self, adapted: bool) -> None:
        self.adapted = adapted
        for layer in self._layers:
            layer.parent[layer.attribute] = layer.adapted if adapted else layer.original

    @contextmanager
    def _running(self, adapted: bool) -> Iterator[None]:
        before = self.adapted
        self.set_adapted(adapted)
        self._layout.set_chain(0)
        try:
            yield
        finally:
            self._install(before)
            mx.clear_cache()

    def train_step(self, example: TrainingExample) -> float:
        tokens, weights = mx.array([example.tokens]), self._weights()
        corrected = np.isin(np.arange(len(example.tokens)), example.rows)
        # Give the tokens that the target corrected the same total weight as all other tokens.
        row_weights = mx.array(
            np.where(corrected, 1.0 / corrected.sum(), 1.0 / max(1, (~corrected).sum())), mx.float32
        )

        def loss(weights: Arrays) -> mx.array:
            """Return the KL divergence from the reference distribution, up to a constant.

            For tokens that the target corrected, the reference is the target's distribution. For all others,
            it is the original draft model's distribution.
            """
            self._set_weights(weights)
            logits = self._net(tokens)[0].astype(mx.float32)
            return (row_weights * (mx.logsumexp(logits, axis=-1) - (reference * logits).sum(axis=-1))).sum()

        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with translate_errors(f"{self._model_name} cannot be trained"):
            with self._running(adapted=False):
                reference = mx.softmax(self._net(tokens)[0].astype(mx.float32), axis=-1)
                target_probs = mx.zeros((len(example.rows), reference.shape[-1]))
                reference[mx.array(example.rows)] = mx.put_along_axis(
                    target_probs, mx.array(example.best), mx.array(example.probs), axis=-1
                )
                evaluate(reference)
            with self._running(adapted=True):
                try:
                    value, gradients = loss_and_gradients(loss, weights, _MAX_GRADIENT_NORM, self._model_name)
                    updated: Any = self._optimiser.apply_gradients(gradients, weights)
                    evaluate(*updated.values(), *self._optimiser_state())
                except BaseException:
                    self._set_weights(weights)
                    raise
        self._set_weights(updated)
        self.peak_step_bytes = max(self.peak_step_bytes, mx.get_peak_memory() - before)
        return float(np.array(value))

    def count_hits(self, tokens: Sequence[int], first: int, *, adapted: bool) -> int:
        with self._running(adapted), translate_errors(f"{self._model_name} could not be run"):
            best = mx.argmax(self._net(mx.array([list(tokens[:-1])]))[0][first - 1 :], axis=-1)
            evaluate(best)
        return int((np.array(best) == np.array(tokens[first:])).sum())

    def adapter_weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: np.array(array) for name, array in self._weights().items()}

    def load_adapter(self, weights: Mapping[str, NDArray[np.float32]]) -> bool:
        shapes = {name: array.shape for name, array in self._weights().items()}
        if {name: array.shape for name, array in weights.items()} != shapes:
            return False
        if not all(np.isfinite(array).all() for array in weights.values()):
            return False
        loaded = {name: mx.array(array.astype(np.float32)) for name, array in weights.items()}
        evaluate(*loaded.values())
        self._set_weights(loaded)
        return True

    def release_thread_state(self) -> None:
        release_thread_state()

    def _weights(self) -> Arrays:
        weights: Arrays = {}
        for layer in self._layers:
            weights[f"{layer.name} a"] = layer.adapted.lora_a
            weights[f"{layer.name} b"] = layer.adapted.lora_b
        return weights

    def _set_weights(self, weights: Arrays) -> None:
        for layer in self._layers:
            layer.adapted.lora_a = weights[f"{layer.name} a"]
            layer.adapted.lora_b = weights[f"{layer.name} b"]

    def _optimiser_state(self) -> list[mx.array]:
        return [array for _, array in named_arrays(self._optimiser.state)]


def adapted_layers(net: Any) -> Iterator[AdaptedLayer]:
    """Yield each linear layer in the transformer blocks, paired with a LoRA layer that has no effect yet."""
    random = np.random.default_rng(0)
    for index, block in enumerate(net.layers):
        for parent_name, parent in sorted(block.named_modules()):
            linear = ((key, one) for key, one in parent.items() if type(one) in (Linear, QuantizedLinear))
            for attribute, module in linear:
                adapted = LoRALinear.from_base(module, r=RANK, scale=_SCALE)
                inputs = adapted.lora_a.shape[0]
                bound = 1.0 / math.sqrt(inputs)
                adapted.lora_a = mx.array(random.uniform(-bound, bound, (inputs, RANK)).astype(np.float32))
                adapted.lora_b = mx.zeros(adapted.lora_b.shape, mx.float32)
                name = ".".join(filter(None, (str(index), parent_name, attribute)))
                yield AdaptedLayer(name, parent, attribute, module, adapted)
