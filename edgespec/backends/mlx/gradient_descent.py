"""Train the weights of heads and draft models by gradient descent, and save the training state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import numpy as np
from mlx import optimizers

from edgespec.backends.mlx.evaluation import evaluate
from edgespec.errors import BackendError, ModelFileError

__all__ = ["Arrays", "GradientDescent", "ParameterGroup", "loss_and_gradients", "save_arrays"]

Arrays: TypeAlias = dict[str, mx.array]
# Learning rate schedule: number of warm-up steps, and fraction of the training after which the rates decay to
# zero.
_WARM_UP_STEPS, _FLAT_FRACTION = 20, 0.13


class TrainedNetwork(Protocol):
    """A network whose weights, keyed by names without colons, can be replaced."""

    weights: Arrays


class ParameterGroup(NamedTuple):
    """Weights that share an optimiser and a peak learning rate."""

    optimiser: Any
    rate: float
    contains: Callable[[mx.array], bool]


class GradientDescent:
    """Trains a network by gradient descent. Owns the optimiser state.

    Args:
        network: The network to train.
        groups: The groups of weights. Each weight belongs to exactly one group.
        max_gradient_norm: Gradients with a larger norm are clipped to this norm.
        name: Name of the network, for messages.

    Attributes:
        steps: Number of steps so far.
    """

    def __init__(
        self, network: TrainedNetwork, groups: Sequence[ParameterGroup], max_gradient_norm: float, name: str
    ) -> None:
        self.steps = 0
        self._network, self._groups, self._name = network, groups, name
        self._max_gradient_norm = max_gradient_norm
        weights = network.weights
        for group in groups:
            group.optimiser.init(_part(weights, group))

    def step(self, loss: Callable[[], mx.array], done: float) -> float:
        """Update the weights, and return the loss from before the update.

        Args:
            loss: Returns the loss of `network` with its current weights.
            done: Completed fraction of the training (0 to 1).

        Raises:
            BackendError: The loss is not finite. The weights are unchanged.
        """

        def loss_of(weights: Arrays) -> mx.array:
            self._network.weights = weights
            return loss()

        weights = self._network.weights
        try:
            value, gradients = loss_and_gradients(loss_of, weights, self._max_gradient_norm, self._name)
        finally:
            self._network.weights = weights
        self.steps += 1
        falling = min(1.0, (1.0 - done) / (1.0 - _FLAT_FRACTION)) * min(1.0, self.steps / _WARM_UP_STEPS)
        updated: Arrays = {}
        for group in self._groups:
            group.optimiser.learning_rate = group.rate * falling
            updated.update(group.optimiser.apply_gradients(_part(gradients, group), _part(weights, group)))
        self._network.weights = updated
        evaluate(*updated.values(), *self._moments().values())
        return float(np.array(value))

    def save(self, path: Path) -> None:
        """Save the weights and optimiser states in a safetensors file. Raises OSError if writing fails."""
        arrays = {**self._network.weights, **self._moments()}
        save_arrays(path, arrays, {"steps": str(self.steps)})

    def load(self, path: Path) -> None:
        """Restore the state saved by `save`.

        Raises:
            ModelFileError: The file is damaged, does not match the network, or was saved by a version of
                edgespec that trained other weights.
        """
        expected = {**self._network.weights, **self._moments()}
        try:
            loaded: Any = mx.load(str(path), return_metadata=True)
            saved, metadata = loaded
            if saved.keys() != expected.keys():
                raise ModelFileError(
                    f"the training run in {path.parent} cannot be continued, because another version of"
                    " edgespec started it",
                    "delete `progress.json` in this folder and run the same command again; the text that has"
                    " been written is used again",
                    code="training_outdated",
                )
            if any(array.shape != expected[name].shape for name, array in saved.items()):
                raise ValueError("the shapes of the arrays do not match")
            self.steps = int(metadata["steps"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ModelFileError(
                f"the saved progress of an interrupted training run is damaged ({path}): {error}",
                f"delete the folder {path.parent} and train again",
                code="training_damaged",
            ) from error
        evaluate(*saved.values())
        self._network.weights = {name: array for name, array in saved.items() if ":" not in name}
        for group in self._groups:
            for name, moments in group.optimiser.state.items():
                if isinstance(moments, dict):
                    moments.update({moment: saved[f"{name}:{moment}"] for moment in moments})

    def _moments(self) -> Arrays:
        """Return the optimiser moments, keyed by weight and moment."""
        return {
            f"{name}:{moment}": array
            for group in self._groups
            for name, moments in group.optimiser.state.items()
            if isinstance(moments, dict)
            for moment, array in moments.items()
        }


def loss_and_gradients(
    loss: Callable[[Arrays], mx.array], weights: Arrays, max_norm: float, name: str
) -> tuple[mx.array, Arrays]:
    """Return a loss and its gradients, which are clipped to a norm of `max_norm`.

    Raises:
        BackendError: The loss is not finite. The message names the trained network, `name`.
    """
    value, gradients = mx.value_and_grad(loss)(weights)
    gradients, norm = optimizers.clip_grad_norm(gradients, max_norm)
    evaluate(value, norm)
    if not mx.isfinite(value + norm).item():
        raise BackendError(
            f"training {name} failed, because its loss is no longer finite", code="training_diverged"
        )
    return value, gradients


def save_arrays(path: Path, arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write arrays to a safetensors file. Raises OSError if it cannot be written."""
    # Pass an open file. Given a path, MLX would append `.safetensors` and, if writing fails, raise a
    # RuntimeError without the reason.
    with path.open("wb") as file:
        mx.save_safetensors(file, arrays, metadata)


def _part(arrays: Arrays, group: ParameterGroup) -> Arrays:
    return {name: array for name, array in arrays.items() if group.contains(array)}
