"""What the training of heads needs to know about a kind of head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from edgespec.backends.drafter_training import TrainingBatch
from edgespec.backends.mlx.gradient_descent import Arrays

if TYPE_CHECKING:
    from edgespec.backends.mlx.teacher import MlxTeacher

__all__ = ["TrainableHead", "least_squares"]

# Strength of the regularisation of a least-squares fit, relative to the mean square of the inputs.
_RIDGE = 0.01


class TrainableHead(ABC):
    """A head whose network is trained, while its output matrix stays that of the target.

    Args:
        net: The network.
        config: The head's `config.json`.

    Attributes:
        title: The kind of head, for messages.
        weights_file: Name of the published file with the weights.
        states: The hidden states that the head reads, numbered as in `HiddenStateSource`.
        draft_tokens: The target's ids of the tokens that the head can guess, int64 [draft tokens].
    """

    title: ClassVar[str]
    weights_file: ClassVar[str]
    states: tuple[int, ...]
    draft_tokens: NDArray[np.int64]

    def __init__(self, net: Module, config: Mapping[str, Any]) -> None:
        self.net = net
        self.config = config

    @classmethod
    @abstractmethod
    def create(cls, teacher: MlxTeacher, examples: TrainingBatch, counts: NDArray[np.int64]) -> Self:
        """Create a new head. See `Student.trainer`."""

    @classmethod
    @abstractmethod
    def read(cls, teacher: MlxTeacher, config: Mapping[str, Any], arrays: Arrays) -> Self:
        """Return a published head, given its `config.json` and its tensors.

        Raises ValueError, KeyError or TypeError if it cannot be compared with a new head.
        """

    @abstractmethod
    def steps(self, done: float) -> int:
        """Return how many tokens ahead the head learns to guess after a fraction of the training."""

    @abstractmethod
    def unroll(self, embeddings: mx.array, hidden: mx.array, steps: int) -> Iterator[mx.array]:
        """Draft several tokens ahead from every token at once.

        Args:
            embeddings: The target's token embeddings [conversations, tokens, size].
            hidden: The hidden states `states` of the target, side by side [conversations, tokens, ...].
            steps: Number of tokens to draft.

        Yields:
            For each step j, the states [conversations, tokens, size] from which the output matrix gives the
            logits of token t + 2 + j.
        """

    @abstractmethod
    def logits(self, states: mx.array) -> mx.array:
        """Return the logits [rows, draft tokens] for states [rows, size] of `unroll`."""

    @abstractmethod
    def published(self) -> Arrays:
        """Return the tensors of the published file."""

    @property
    def weights(self) -> Arrays:
        """The trained weights by name."""
        leaves: Any = tree_flatten(self.net.parameters())
        return dict(leaves)

    @weights.setter
    def weights(self, weights: Arrays) -> None:
        self.net.update(tree_unflatten(list(weights.items())))


def least_squares(inputs: NDArray[np.float32], goals: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the matrix [input size, goal size] that best maps rows of inputs to rows of goals.

    Fitted to a few thousand tokens, it takes seconds and saves hundreds of training steps.
    """
    gram = inputs.T @ inputs
    ridge = _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram), dtype=np.float32)
    solution: NDArray[np.float32] = np.linalg.solve(gram + ridge, inputs.T @ goals)
    return solution
