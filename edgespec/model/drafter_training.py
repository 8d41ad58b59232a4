"""Interfaces for training heads and draft models, including online training between replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.model.base import LanguageModel, Progress, Vocabulary


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch of training conversations, padded at the end to equal length.

    Attributes:
        tokens: int32 [conversations, tokens].
        replied: Whether each token belongs to a reply by the target, bool [conversations, tokens]. Drafters
            learn to predict only these tokens.
    """

    tokens: NDArray[np.int32]
    replied: NDArray[np.bool_]

    def replied_after(self, count: int) -> NDArray[np.bool_]:
        """Return whether the token `count` positions later is in a reply, bool [conversations, tokens]."""
        later = np.zeros_like(self.replied)
        later[:, : max(0, self.replied.shape[1] - count)] = self.replied[:, count:]
        return later

    def drafting_rows(self, depth: int) -> NDArray[np.int64]:
        """Return the indices, in the flattened batch, of the tokens from which to draft `depth` tokens.

        All drafted tokens belong to a reply. The token after each returned one is the draft's root, so it is
        not drafted.
        """
        return np.flatnonzero(np.logical_and.reduce([self.replied_after(2 + i) for i in range(depth)]))


class Guesser(Protocol):
    """A drafter whose accuracy can be evaluated. All methods must be called from the same thread.

    Attributes:
        draft_tokens: The target's token ids that the drafter can propose, int64 [draft tokens].
    """

    draft_tokens: NDArray[np.int64]

    def ranks(self, batch: TrainingBatch, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draft `depth` tokens from each token in `batch.drafting_rows(depth)`.

        Returns:
            The rank of the target's top token among the drafter's candidates for each drafted token, int64
            [drafts, depth], and the index of each draft's conversation in the batch, int64 [drafts]. Rank 0
            is the drafter's first choice. A token that the drafter cannot propose ranks after all others.
            Each token is judged as if all earlier drafted tokens were correct.
        """


class DrafterTrainer(Guesser, Protocol):
    """A head or draft model in training, with its optimiser state."""

    def step(self, batch: TrainingBatch, done: float) -> float:
        """Run a training step and return the loss before the update.

        Args:
            batch: Conversations. At least one must have a reply of several tokens.
            done: Completed fraction of the training (0 to 1), which determines the learning rate.

        Raises:
            BackendError: The loss is not finite, or the step failed.
        """

    def save_state(self, path: Path) -> None:
        """Save the weights and optimiser state in a safetensors file. Raises OSError if writing fails."""

    def load_state(self, path: Path) -> None:
        """Restore the state from `save_state`. Raises ModelFileError if the file does not match."""

    def publish(self, folder: Path) -> None:
        """Write the drafter to a folder in its published layout. Raises OSError if writing fails."""


class Student(Protocol):
    """A kind of head, or a draft model, that can be trained for a target.

    All methods must be called from the thread that loaded the target.

    Attributes:
        title: Name of the kind of drafter, such as `EAGLE-3 head`.
    """

    title: str

    def trainer(self, examples: TrainingBatch, counts: NDArray[np.int64]) -> DrafterTrainer:
        """Create a trainer that starts from scratch.

        Args:
            examples: Conversations for fitting the initial weights of a head.
            counts: How often each token of the vocabulary occurs in the training replies.

        Raises:
            CapabilityError: The target does not support heads of this kind.
            ModelFileError: The draft model cannot be loaded.
        """

    def published(self, folder: Path) -> Guesser | None:
        """Load the result of an earlier training run, or return None if the folder contains none.

        Raises:
            ModelFileError: The folder contains something else, such as a head that was trained for a
                different target.
        """

    def untrained(self) -> Guesser | None:
        """Return the untrained draft model as a baseline, or None for heads."""


class Writer(Protocol):
    """A model that generates training conversations. All methods must be called from the same thread."""

    vocabulary: Vocabulary
    context_tokens: int
    """Context length that the model was trained for, or 0 if it is unknown."""
    memory_bytes: int
    """Memory that the model takes up, in bytes."""

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
            seed: Random seed. Calls with the same arguments generate the same text.
            progress: Called with the completed fraction. Returning False cancels the call.

        Returns:
            The new tokens of each prompt, including the end token.

        Raises:
            CancelledError: `progress` returned False.
            BackendError: The model failed.
        """


class Teacher(Writer, Protocol):
    """A target that trains drafters, and can write the conversations for it."""

    why_slow: str
    """Why training is slow on this machine and what to do about it, or an empty string."""

    def peak_bytes(self) -> int:
        """Return the most memory used since the last call for weights, gradients and states, in bytes."""

    def head(self, method: str) -> Student:
        """Return an untrained head of the given kind, such as `eagle3`, for this target."""

    def draft(self, path: Path, name: str, lora: bool) -> Student:
        """Return a draft model to train for this target.

        Args:
            path: Folder of the draft model. It must use the target's token ids.
            name: Name of the draft model, for messages.
            lora: Whether to train LoRA weights, which takes less memory than training all weights.
        """


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """A token sequence with the target's most likely next tokens.

    Attributes:
        rows: Indices into `tokens`. The draft model learns to predict the token after each index.
        best: The target's k most likely tokens after each of `rows`, int64 [rows, k].
        probs: The probabilities of `best`, float32 [rows, k]. Each row sums to 1.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    best: NDArray[np.int64]
    probs: NDArray[np.float32]


class Trainer(Protocol):
    """Trains an adapter for a draft model online (online speculative decoding, arXiv 2310.07177).

    The loaded weights never change. Enabling or disabling the adapter does not recompute the KV cache. All
    methods must be called from the model's thread.
    """

    identity: str
    """Fingerprint of the model and its weights. A saved adapter is valid only for the same fingerprint."""

    @property
    def adapted(self) -> bool:
        """Whether the draft model runs with the trained adapter."""

    @property
    def state_bytes(self) -> int:
        """Memory used by the adapter and the optimiser state, in bytes."""

    @property
    def peak_step_bytes(self) -> int:
        """Peak additional memory used by any training step so far in bytes, or 0 before the first step."""

    def set_adapted(self, enabled: bool) -> None:
        """Enable or disable the adapter."""

    def train_step(self, example: TrainingExample) -> float:
        """Run one training step and return the loss before the update.

        Raises:
            BackendError: The step failed. The adapter is unchanged.
        """

    def count_hits(self, tokens: Sequence[int], first: int, *, adapted: bool) -> int:
        """Return how many of `tokens[first:]` the model predicts as the most likely next token."""

    def adapter_weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the adapter's weights, keyed by name."""

    def load_adapter(self, weights: Mapping[str, NDArray[np.float32]]) -> bool:
        """Load saved adapter weights, or return False and change nothing if their names or shapes differ."""

    def release_thread_state(self) -> None:
        """Free memory cached for the calling thread. Call this before the thread exits."""


class Trainable(LanguageModel, Protocol):
    """A model that can be trained online as a draft model. Its `facts.capabilities.trainable` is True."""

    def trainer(self) -> Trainer:
        """Return a new trainer for this model.

        Raises:
            CapabilityError: The model has no layers that can be adapted.
        """
