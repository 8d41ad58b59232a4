"""Train and evaluate heads of any kind. Also defines the base class of trainable heads."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.gradient_descent import Arrays, GradientDescent, ParameterGroup, save_arrays
from edgespec.backends.mlx.teacher_model import TeacherModel, token_ranks
from edgespec.errors import ModelFileError
from edgespec.model.drafter_training import TrainingBatch

__all__ = ["HeadStudent", "MlxHeadTrainer", "TrainableHead", "least_squares"]

# Regularisation strengths to try in least-squares fits, relative to the mean square of the inputs. Strong
# regularisation is best for real models, which have about as many input values as there are rows to fit.
_RIDGES = (3.0, 1.0, 0.3, 0.1, 0.01)
# Fraction of the rows to fit while choosing the regularisation. The others are predicted.
_FITTED_FRACTION = 0.75
_CONFIG = "config.json"
# Number of tokens in a training step's softmax. These are the tokens to which the target assigns the highest
# total probability in the batch. More tokens would barely change the loss, but would dominate the computation
# time.
_CANDIDATES = 2_048
# Loss weight of each draft step, relative to the previous step.
_DECAY = 0.85
# Peak learning rates for matrices, and for norms and biases.
_MATRIX_RATE, _VECTOR_RATE = 0.02, 0.003
_MAX_GRADIENT_NORM = 5.0


class TrainableHead(ABC):
    """Base class for trainable heads. The output matrix is a fixed copy of the target's.

    Args:
        net: The network to train.
        config: The head's `config.json`.

    Attributes:
        name: Name of the command that trains the head (see `HeadTraining`).
        title: The kind of head, for messages.
        weights_file: Name of the published weights file.
        states: The hidden states that the head reads, numbered as in `HiddenStateSource`.
        draft_tokens: Target token ids of the tokens that the head can draft, int64 [draft tokens].
        rate_scale: Factor for the learning rate of matrices.
    """

    rate_scale: ClassVar[float] = 1.0
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
        """Create a head from a published head's `config.json` and tensors.

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
        """The trained weights, keyed by name."""
        leaves: Any = tree_flatten(self.net.parameters())
        return dict(leaves)

    @weights.setter
    def weights(self, weights: Arrays) -> None:
        self.net.update(tree_unflatten(list(weights.items())))


def least_squares(inputs: NDArray[np.float32], goals: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the matrix [input size, goal size] that best maps rows of `inputs` to rows of `goals`.

    Fitting initial weights to a few thousand tokens takes seconds, and saves hundreds of training steps. The
    regularisation is the one of `_RIDGES` with which the first rows predict the last ones best.
    """
    fitted = int(_FITTED_FRACTION * len(inputs))
    solve = _ridge_regression(inputs[:fitted], goals[:fitted])
    errors = [float(((inputs[fitted:] @ solve(ridge) - goals[fitted:]) ** 2).sum()) for ridge in _RIDGES]
    return _ridge_regression(inputs, goals)(_RIDGES[int(np.argmin(errors))])


def _ridge_regression(
    inputs: NDArray[np.float32], goals: NDArray[np.float32]
) -> Callable[[float], NDArray[np.float32]]:
    """Return a function that fits a matrix like `least_squares` with a given regularisation strength."""
    rows, columns = inputs.shape
    # Solve the smaller of the two equivalent systems of equations.
    few_rows = rows < columns
    matrix = inputs @ inputs.T if few_rows else inputs.T @ inputs
    products = goals if few_rows else inputs.T @ goals
    unit = np.float32((inputs**2).sum() / columns) * np.eye(len(matrix), dtype=np.float32)

    def solve(ridge: float) -> NDArray[np.float32]:
        solution: NDArray[np.float32] = np.linalg.solve(matrix + np.float32(ridge) * unit, products)
        return inputs.T @ solution if few_rows else solution

    return solve


class HeadGuesser:
    """Implements `Guesser` for a head of any kind."""

    def __init__(self, teacher: TeacherModel, head: TrainableHead) -> None:
        self._teacher, self.head = teacher, head
        self.draft_tokens = head.draft_tokens
        self._draft_tokens = mx.array(head.draft_tokens)

    def ranks(self, batch: TrainingBatch, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        states = self._teacher.states(batch.tokens, self.head.states)
        best = states.logits.argmax(axis=-1).reshape(-1)
        evaluate(best, states.hidden)
        rows = batch.drafting_rows(depth)
        embeddings = self._teacher.embed(mx.array(batch.tokens))
        # The position of each of the target's tokens in the draft vocabulary, or -1.
        columns = np.full(self._teacher.vocabulary.size, -1)
        columns[self.draft_tokens] = np.arange(len(self.draft_tokens))
        goals = columns[np.array(best)]
        ranks = []
        for step, state in enumerate(self.head.unroll(embeddings, states.hidden, depth)):
            drafted = self.head.logits(state.reshape(-1, state.shape[-1])[mx.array(rows)])
            ranks.append(token_ranks(drafted, goals[rows + 1 + step]))
        return np.stack(ranks, axis=1), rows // batch.tokens.shape[1]


class MlxHeadTrainer(HeadGuesser):
    """Implements `DrafterTrainer` for a head of any kind."""

    def __init__(self, teacher: TeacherModel, head: TrainableHead) -> None:
        super().__init__(teacher, head)
        # Train matrices with Muon, and norms and biases with AdamW.
        self._descent = GradientDescent(
            head,
            (
                ParameterGroup(
                    optimizers.Muon(0.0, weight_decay=0.0),
                    head.rate_scale * _MATRIX_RATE,
                    lambda array: array.ndim == 2,
                ),
                ParameterGroup(
                    optimizers.AdamW(0.0, betas=[0.9, 0.95], weight_decay=0.0),
                    _VECTOR_RATE,
                    lambda array: array.ndim == 1,
                ),
            ),
            _MAX_GRADIENT_NORM,
            f"the draft head of {teacher.name}",
        )

    def step(self, batch: TrainingBatch, done: float) -> float:
        with translate_errors(f"the draft head of {self._teacher.name} cannot be trained"):
            return self._descent.step(self.loss(batch, self.head.steps(done)), done)

    def loss(self, batch: TrainingBatch, steps: int) -> Callable[[], mx.array]:
        """Return a function that computes the head's loss on a batch with its current weights.

        The loss is the cross-entropy against the target per predicted token, as a weighted mean over the
        draft steps. It is comparable between training steps that draft different numbers of tokens.

        Args:
            batch: See `DrafterTrainer.step`.
            steps: Number of tokens to draft.
        """
        states = self._teacher.states(batch.tokens, self.head.states)
        replied = np.flatnonzero(batch.replied_after(1))
        candidates, target_probs = self._goals(states.logits, replied)
        output = self._teacher.output_rows(candidates)
        embeddings, hidden = self._teacher.embed(mx.array(batch.tokens)), states.hidden
        evaluate(output, target_probs, embeddings, hidden)
        # For each step, the rows of the flattened batch from which the head predicts a reply token, and the
        # row of `target_probs` with the target's distribution for each of them.
        rows = [np.flatnonzero(batch.replied_after(2 + step)) for step in range(steps)]
        goals = [mx.array(np.searchsorted(replied, each + 1 + step)) for step, each in enumerate(rows)]
        weights = [_DECAY**step for step in range(steps)]

        def loss() -> mx.array:
            total = mx.array(0.0)
            for step, state in enumerate(self.head.unroll(embeddings, hidden, steps)):
                logits = state.reshape(-1, state.shape[-1])[mx.array(rows[step])] @ output.T
                probs = target_probs[goals[step]]
                losses = mx.logsumexp(logits, axis=-1) - (probs * logits).sum(axis=-1)
                total = total + weights[step] * losses.sum() / max(1, len(rows[step]))
            return total / sum(weights)

        return loss

    def _goals(self, logits: mx.array, replied: NDArray[np.int64]) -> tuple[mx.array, mx.array]:
        """Return the candidate tokens of a training step, and the target's probabilities for them.

        Args:
            logits: The target's logits for the batch.
            replied: The rows of the flattened batch whose next token belongs to a reply.
        """
        probs = mx.softmax(logits.reshape(-1, logits.shape[-1])[mx.array(replied)], axis=-1)
        mass = probs.sum(axis=0)[self._draft_tokens]
        count = min(_CANDIDATES, len(self.head.draft_tokens))
        candidates = self._draft_tokens[mx.sort(mx.argpartition(-mass, count - 1)[:count])]
        probs = probs[:, candidates]
        return candidates, probs / probs.sum(axis=-1, keepdims=True)

    def save_state(self, path: Path) -> None:
        self._descent.save(path)

    def load_state(self, path: Path) -> None:
        self._descent.load(path)

    def publish(self, folder: Path) -> None:
        file, config = folder / self.head.weights_file, json.dumps(self.head.config, indent=2)
        save_arrays(file, self.head.published(), {"format": "pt"})
        (folder / _CONFIG).write_text(f"{config}\n", encoding="utf-8")


class HeadStudent:
    """Implements `Student` for one kind of head."""

    def __init__(self, teacher: TeacherModel, kind: type[TrainableHead]) -> None:
        self._teacher, self._kind = teacher, kind
        self.title = kind.title

    def trainer(self, examples: TrainingBatch, counts: NDArray[np.int64]) -> MlxHeadTrainer:
        mx.random.seed(0)
        return MlxHeadTrainer(self._teacher, self._kind.create(self._teacher, examples, counts))

    def untrained(self) -> None:
        """See `Student`."""

    def published(self, folder: Path) -> HeadGuesser | None:
        teacher, kind = self._teacher, self._kind
        if not any((folder / name).exists() for name in (_CONFIG, kind.weights_file)):
            return None
        try:
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            arrays: Any = mx.load(str(folder / kind.weights_file))
            head = kind.read(teacher, config, arrays)
            evaluate(*head.weights.values())
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(
                f"{folder} already contains files, but no usable {kind.title} for {teacher.name}: {error}",
                "choose another folder for the new draft head",
                code="output_exists",
            ) from error
        return HeadGuesser(teacher, head)
