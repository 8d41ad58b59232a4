"""What a backend offers for training heads: the target as a teacher, and the trainer of a head."""

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
    """Conversations to train with, padded at the end to the same length.

    Attributes:
        tokens: int32 [conversations, tokens].
        replied: Whether the target wrote a token in a reply, bool [conversations, tokens]. A head learns to
            guess these tokens only.
    """

    tokens: NDArray[np.int32]
    replied: NDArray[np.bool_]


class Guesser(Protocol):
    """A head whose guesses can be counted. All methods must be called from the same thread."""

    def guesses(self, batch: TrainingBatch, depth: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Draft from every token from which the head could guess `depth` tokens of a reply.

        Returns:
            Whether each guess is the target's most likely token, bool [drafts, depth], and the index of each
            draft's conversation in the batch, int64 [drafts]. Each guess assumes that those before it were
            right.
        """


class HeadTrainer(Guesser, Protocol):
    """A head and the state of its optimiser."""

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
        """Restore what `save_state` saved. Raises ModelFileError if the file does not fit this head."""

    def publish(self, folder: Path) -> None:
        """Write the head to a folder, in the layout of published heads. Raises OSError."""


class Teacher(Protocol):
    """A target that writes text and trains heads. All methods must be called from the same thread."""

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
            counts: How often each token of the vocabulary occurs in the replies to train with.

        Raises:
            CapabilityError: The target does not support heads of this kind.
        """

    def published_head(self, method: str, folder: Path) -> Guesser | None:
        """Load a published head, to count its guesses, or return None if the folder contains no head.

        Raises:
            ModelFileError: The folder contains a head of another kind, or one for another target.
        """
