"""Define the interfaces through which a backend trains heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Progress, Vocabulary

__all__ = ["Guesser", "HeadTrainer", "Teacher", "TrainingBatch"]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch of training conversations, padded at the end to the same length.

    Attributes:
        tokens: int32 [conversations, tokens].
        replied: Whether each token belongs to a reply, bool [conversations, tokens]. Heads learn to predict
            only these tokens.
    """

    tokens: NDArray[np.int32]
    replied: NDArray[np.bool_]


class Guesser(Protocol):
    """A head whose draft accuracy can be evaluated. All methods must be called from the same thread."""

    def guesses(self, batch: TrainingBatch, depth: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Draft `depth` tokens from every position followed by at least `depth` reply tokens.

        Returns:
            Whether each drafted token is the target's most likely token, bool [drafts, depth], and the index
            of each draft's conversation in the batch, int64 [drafts]. A token is judged as if all drafted
            tokens before it were correct.
        """


class HeadTrainer(Guesser, Protocol):
    """A head in training, together with the state of its optimiser."""

    def step(self, batch: TrainingBatch, done: float) -> float:
        """Run a training step and return the loss before it.

        Args:
            batch: Conversations, at least one of which has a reply of several tokens.
            done: Completed fraction of the training (0 to 1), on which the learning rate depends.

        Raises:
            BackendError: The loss is not finite, or the step failed.
        """

    def save_state(self, path: Path) -> None:
        """Save the weights and the optimiser's state to a `.safetensors` file. Raises OSError."""

    def load_state(self, path: Path) -> None:
        """Restore the state saved by `save_state`. Raises ModelFileError if it belongs to another head."""

    def publish(self, folder: Path) -> None:
        """Write the head to a folder, in the file layout of published heads. Raises OSError."""


class Teacher(Protocol):
    """A target that generates training text and trains heads.

    All methods must be called from the same thread.
    """

    vocabulary: Vocabulary
    context_tokens: int
    """Context length that the target was trained for. 0 if unknown."""

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_tokens: int,
        seed: int,
        progress: Progress,
    ) -> list[list[int]]:
        """Continue several prompts at once, each until an end token or `max_tokens`.

        Args:
            prompts: The tokens of each prompt.
            temperatures: The temperature for each prompt.
            max_tokens: Maximum number of new tokens per prompt.
            seed: Seed of the random draws. The same arguments give the same text.
            progress: Called with the completed fraction. Returning False cancels the call.

        Returns:
            The new tokens of each prompt, including the end token.

        Raises:
            CancelledError: `progress` returned False.
            BackendError: The target failed.
        """

    def head_trainer(self, method: str, examples: TrainingBatch, counts: NDArray[np.int64]) -> HeadTrainer:
        """Create a trainer with a new head.

        Args:
            method: The kind of head, such as `eagle3`.
            examples: Conversations from which to choose the initial weights.
            counts: Number of occurrences of each token of the vocabulary in the training replies.

        Raises:
            CapabilityError: The target does not support heads of this kind.
        """

    def published_head(self, method: str, folder: Path) -> Guesser | None:
        """Load a published head for evaluation. Return None if the folder contains no head.

        Raises:
            ModelFileError: The folder contains a head of another kind, or one for another target.
        """
