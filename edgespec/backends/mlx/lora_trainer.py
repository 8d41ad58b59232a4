"""A low-rank change beside a model's weights, trained on what a target said.

Sources: OSD (arXiv 2310.07177), LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from numpy.typing import NDArray

from edgespec.backends.mlx.evaluation import evaluate, release_thread_state, translate_errors
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.backends.optional_features import TrainingExample
from edgespec.errors import BackendError, CapabilityError

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["MlxTrainer"]

RANK = 8
_SCALE = 2.0
_LEARNING_RATE = 3e-4
_LARGEST_GRADIENT = 1.0
# How much of the loss is to stay what it was where it was right.
_KEEP = 1.0

_Weights: TypeAlias = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a linear layer stands in its parent, and what may stand there in its place."""

    name: str
    parent: Any
    attribute: str
    original: Any
    adapted: LoRALinear


class MlxTrainer:
    """Puts LoRA layers of rank 8 in the place of the linear layers of a model's blocks, and trains them.

    Off, the very modules that were loaded are back in their places.
    """

    def __init__(self, model: MlxModel, net: Any, shape: PassLayout, identity: str) -> None:
        self.identity = identity
        self.adapted = False
        self.peak_step_bytes = 0
        self._model = model
        self._net = net
        self._shape = shape
        self._places = list(_places(net))
        if not self._places:
            raise CapabilityError(f"{model.facts.name} has no linear layers that could be adapted")
        self._optimiser = optimizers.Adam(learning_rate=_LEARNING_RATE)
        evaluate(*self._arrays())

    @property
    def state_bytes(self) -> int:
        """The changes, and Adam's two moments of each, which are made with the first step."""
        return 3 * sum(array.nbytes for array in self._weights().values())

    def set_adapted(self, enabled: bool) -> None:
        self._model.checkpoint()  # nothing that was begun with the others is left
        self._put(enabled)

    def _put(self, adapted: bool) -> None:
        self.adapted = adapted
        for place in self._places:
            place.parent[place.attribute] = place.adapted if adapted else place.original

    @contextmanager
    def _as(self, adapted: bool) -> Iterator[None]:
        """Run like this in here. No cache is used, so nothing of the model's memory changes."""
        before = self.adapted
        self._model.checkpoint()
        self._shape.chain(0)
        self._put(adapted)
        try:
            yield
        finally:
            self._put(before)
            mx.clear_cache()

    def train_step(self, example: TrainingExample) -> float:
        tokens, weights = mx.array([example.tokens]), self._weights()
        # Every row weighs as much as the others of its kind.
        wrong = np.isin(np.arange(len(example.tokens)), example.rows)
        share = mx.array(np.where(wrong, 1.0 / wrong.sum(), _KEEP / max(1, (~wrong).sum())), mx.float32)

        def loss(weights: _Weights) -> mx.array:
            """Forward KL, but for a constant: to the target where the draft was wrong, else to the original.

            Without the second what the draft knew already would be forgotten for a few corrections.
            """
            self._set(weights)
            said = self._net(tokens)[0].astype(mx.float32)
            return (share * (mx.logsumexp(said, axis=-1) - (wanted * said).sum(axis=-1))).sum()

        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with translate_errors(f"{self._model.facts.name} cannot be trained"):
            with self._as(False):
                wanted = mx.softmax(self._net(tokens)[0].astype(mx.float32), axis=-1)
                best = mx.zeros((len(example.rows), wanted.shape[-1]))
                wanted[mx.array(example.rows)] = mx.put_along_axis(
                    best, mx.array(example.best), mx.array(example.probs), axis=-1
                )
                evaluate(wanted)
            with self._as(True):
                try:
                    value, gradients = mx.value_and_grad(loss)(weights)
                    gradients, norm = optimizers.clip_grad_norm(gradients, _LARGEST_GRADIENT)
                    evaluate(value, norm)
                    if not mx.isfinite(value + norm).item():
                        raise BackendError(f"{self._model.facts.name} gives no finite loss to learn from")
                    updated: Any = self._optimiser.apply_gradients(gradients, weights)
                    evaluate(*updated.values(), *self._state())
                except BaseException:
                    self._set(weights)
                    raise
        self._set(updated)
        self.peak_step_bytes = max(self.peak_step_bytes, mx.get_peak_memory() - before)
        loss_before: Any = value.item()
        return float(loss_before)

    def count_hits(self, tokens: Sequence[int], first: int, *, adapted: bool) -> int:
        with self._as(adapted), translate_errors(f"{self._model.facts.name} could not be run"):
            said = mx.argmax(self._net(mx.array([list(tokens[:-1])]))[0][first - 1 :], axis=-1)
            evaluate(said)
        return int((np.array(said) == np.array(tokens[first:])).sum())

    def adapter_weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: np.array(array) for name, array in self._weights().items()}

    def load_adapter(self, weights: Mapping[str, NDArray[np.float32]]) -> bool:
        own = self.adapter_weights()
        if set(weights) != set(own):
            return False
        if any(
            weights[name].shape != array.shape or not np.isfinite(weights[name]).all()
            for name, array in own.items()
        ):
            return False
        taken = {name: mx.array(array.astype(np.float32)) for name, array in weights.items()}
        evaluate(*taken.values())
        self._set(taken)
        return True

    def release_thread_state(self) -> None:
        release_thread_state()

    def _weights(self) -> _Weights:
        kept = {}
        for place in self._places:
            kept[f"{place.name} a"], kept[f"{place.name} b"] = place.adapted.lora_a, place.adapted.lora_b
        return kept

    def _set(self, weights: _Weights) -> None:
        for place in self._places:
            place.adapted.lora_a, place.adapted.lora_b = (
                weights[f"{place.name} a"],
                weights[f"{place.name} b"],
            )

    def _state(self) -> list[mx.array]:
        """The arrays of the optimiser."""
        leaves: Any = tree_flatten(self._optimiser.state)
        return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]

    def _arrays(self) -> list[mx.array]:
        return [*self._weights().values(), *self._state()]


def _places(net: Any) -> Iterator[_Place]:
    """Every linear layer of the blocks, by name; its change is nothing to begin with."""
    random = np.random.default_rng(0)
    for index, layer in enumerate(net.layers):
        for parent_name, parent in sorted(layer.named_modules()):
            for attribute, module in parent.items():
                if type(module) not in (Linear, QuantizedLinear):
                    continue
                adapted = LoRALinear.from_base(module, r=RANK, scale=_SCALE)
                inputs = adapted.lora_a.shape[0]
                bound = 1.0 / math.sqrt(inputs)
                adapted.lora_a = mx.array(random.uniform(-bound, bound, (inputs, RANK)).astype(np.float32))
                adapted.lora_b = mx.zeros(adapted.lora_b.shape, mx.float32)
                name = ".".join(filter(None, (str(index), parent_name, attribute)))
                yield _Place(name, parent, attribute, module, adapted)
