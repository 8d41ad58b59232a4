"""Base class for trainable heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from edgespec.backends.mlx.gradient_descent import Arrays
from edgespec.backends.mlx.teacher_model import TeacherModel
from edgespec.model.drafter_training import TrainingBatch

__all__ = ["TrainableHead", "least_squares"]

# Strength of the regularisation of a least-squares fit, relative to the mean square of the inputs.
_RIDGE = 0.01


class TrainableHead(ABC):
    """A head whose network is trained. Its output matrix is a fixed copy of the target's.

    Args:
        net: The network.
        config: The head's `config.json`.

    Attributes:
        name: Name of the command that trains the head (see `HeadTraining`).
        title: The kind of head, for messages.
        weights_file: Name of the published file with the weights.
        states: The hidden states that the head reads, numbered as in `HiddenStateSource`.
        draft_tokens: Target token ids of the tokens that the head can draft, int64 [draft tokens].
    """

    name: ClassVar[str]
    title: ClassVar[str]
    weights_file: ClassVar[str]
    states: tuple[int, ...]
    draft_tokens: NDArray[np.int64]

    def __init__(self, net: Module, config: Mapping[str, Any]) -> None:
        self.net = net
        self.config = config

    @classmethod
    @abstractmethod
    def create(cls, teacher: TeacherModel, examples: TrainingBatch, counts: NDArray[np.int64]) -> Self:
        """Create a new head. See `Student.trainer`."""

    @classmethod
    @abstractmethod
    def read(cls, teacher: TeacherModel, config: Mapping[str, Any], arrays: Arrays) -> Self:
        """Create a head from the `config.json` and the tensors of a published one.

        Raises:
            ValueError, KeyError, TypeError: The head is invalid, or was made for a different target.
        """

    @abstractmethod
    def steps(self, done: float) -> int:
        """Return how many tokens to draft per training step, given the completed fraction of the training."""

    @abstractmethod
    def unroll(self, embeddings: mx.array, hidden: mx.array, steps: int) -> Iterator[mx.array]:
        """Draft several tokens ahead from every token at once.

        Args:
            embeddings: The target's token embeddings [conversations, tokens, size].
            hidden: The target's hidden states listed in `states`, concatenated [conversations, tokens, ...].
            steps: Number of tokens to draft.

        Yields:
            For each step j, the head's hidden states [conversations, tokens, size]. The output matrix maps
            the state of token t to the logits of token t + 2 + j.
        """

    @abstractmethod
    def logits(self, states: mx.array) -> mx.array:
        """Return the logits [rows, draft tokens] for hidden states [rows, size] from `unroll`."""

    @abstractmethod
    def published(self) -> Arrays:
        """Return the tensors to publish, keyed by their names in the published layout."""

    @property
    def weights(self) -> Arrays:
        """The trained weights by name."""
        leaves: Any = tree_flatten(self.net.parameters())
        return dict(leaves)

    @weights.setter
    def weights(self, weights: Arrays) -> None:
        self.net.update(tree_unflatten(list(weights.items())))


def least_squares(inputs: NDArray[np.float32], goals: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the matrix [input size, goal size] that best maps rows of `inputs` to rows of `goals`.

    Initial weights that are fitted to a few thousand tokens within seconds save hundreds of training steps.
    """
    gram = inputs.T @ inputs
    ridge = _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram), dtype=np.float32)
    solution: NDArray[np.float32] = np.linalg.solve(gram + ridge, inputs.T @ goals)
    return solution
