"""Protocols for optional model features: hidden states for heads, and online training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.model.base import LanguageModel
from edgespec.model.hidden_state_log import HiddenStateLog

__all__ = ["HeadModel", "HiddenStateSource", "Trainable", "Trainer", "TrainingExample"]


class HeadModel(LanguageModel, Protocol):
    """A head: a draft model that reads the target's hidden states.

    `snapshot` copies only the head's own KV cache. If the cache starts after the first requested position, so
    does the snapshot.
    """

    @property
    def log(self) -> HiddenStateLog:
        """The log of the target's hidden states that the head reads."""

    @property
    def first_position(self) -> int:
        """The first position at which a token can be run."""

    @property
    def last_position(self) -> int:
        """The last position at which a token can be run."""

    def start_at(self, position: int) -> None:
        """Clear the KV cache and make it start at `position`. Tokens before `position` are never run."""


class HiddenStateSource(LanguageModel, Protocol):
    """A target that keeps the hidden states of its committed tokens for heads."""

    def log_hidden_states(self, states: Sequence[int]) -> HiddenStateLog:
        """Start a log of the hidden states of all tokens committed from now on, including prompts.

        Several logs can be open at once. Logging does not change the model's logits.

        Args:
            states: Numbers of the hidden states to log, in the order in which a row concatenates them. Number
                k is the input of layer k. The number of layers is the last layer's output before the final
                norm, and `POST_NORM` is the state after the final norm. See also `stream_states`.

        Raises:
            CapabilityError: One of the hidden states does not exist in the model or cannot be read.
            MemoryBudgetError: There is not enough memory for the log.
        """

    def stop_logging(self, log: HiddenStateLog) -> None:
        """Stop appending to a log that `log_hidden_states` returned."""


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
    """Fingerprint of the model and its weights. Saved adapters are only valid for the same fingerprint."""

    @property
    def adapted(self) -> bool:
        """Whether the draft model runs with the trained adapter."""

    @property
    def state_bytes(self) -> int:
        """Memory used by the adapter and the optimiser state, in bytes."""

    @property
    def peak_step_bytes(self) -> int:
        """Peak additional memory used by any training step so far, in bytes. 0 before the first step."""

    def set_adapted(self, enabled: bool) -> None:
        """Enable or disable the adapter."""

    def train_step(self, example: TrainingExample) -> float:
        """Run one training step and return the loss before it.

        Raises:
            BackendError: The step failed. The adapter is unchanged.
        """

    def count_hits(self, tokens: Sequence[int], first: int, *, adapted: bool) -> int:
        """Return how many of `tokens[first:]` the model predicts as the most likely next token."""

    def adapter_weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the adapter's weights, keyed by name."""

    def load_adapter(self, weights: Mapping[str, NDArray[np.float32]]) -> bool:
        """Load saved adapter weights. Returns False and changes nothing if their names or shapes differ."""

    def release_thread_state(self) -> None:
        """Free memory cached for the calling thread. Call this before the thread ends."""


class Trainable(LanguageModel, Protocol):
    """A model that can be trained online as a draft model. Its `facts.capabilities.trainable` is True."""

    def trainer(self) -> Trainer:
        """Return a new trainer for this model.

        Raises:
            CapabilityError: The model has no layers that can be adapted.
        """
