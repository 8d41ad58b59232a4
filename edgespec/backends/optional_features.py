"""What only some models can do: draft without some of their layers, and learn from what a target says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel

__all__ = ["Skippable", "Trainable", "Trainer", "TrainingExample"]


class Skippable(LanguageModel, Protocol):
    """A model that drafts without some of its layers, and tells how well that would go.

    `self_draft(SkippedLayers(layers))` costs next to nothing and may be called for every set that is tried.
    """

    @property
    def layer_count(self) -> int:
        """How many layers there are; the first and the last may not be skipped."""

    def top1_agreement(self, layers: Sequence[int], tokens: Sequence[int]) -> float:
        """How often the best token is the same without these layers, from 0 to 1.

        tokens: the last tokens of the cache, in order; one pass runs them again after what is before them.
        What it says with all layers is kept for the next set, while cache and tokens stay the same.
        The cache is left as it is, an open round is ended. Raises OptionError for the first layer, the last
        or one that is not there, CapabilityError where layers cannot be skipped or more tokens were asked
        for than the cache can look back on, and CancelledError.
        """

    def release_thread_state(self) -> None:
        """Let go of what is kept for this thread, which may be about to end."""


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """A piece of text and what a target said at some places of it.

    tokens: the text. rows: after which of them. best: the target's best tokens there, int [rows, k], and
    probs: how likely they are among themselves, float [rows, k].
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    best: NDArray[np.int64]
    probs: NDArray[np.float32]


class Trainer(Protocol):
    """What changes a draft model a little beside its weights, which stay as they are (OSD, arXiv 2310.07177).

    Between calls the model runs as `adapted` says. Its cache is not looked at: what is in there stays
    computed as it was. The methods belong to the model's thread.
    """

    identity: str
    """Tells the model apart from others, its weights included."""

    @property
    def adapted(self) -> bool:
        """Whether the model runs with what was learnt."""

    @property
    def state_bytes(self) -> int:
        """What is kept for learning: what was learnt, and what training remembers of it."""

    @property
    def peak_step_bytes(self) -> int:
        """The most that a step has taken beside that, while it ran; 0 before the first."""

    def set_adapted(self, enabled: bool) -> None:
        """Run with what was learnt, or exactly as loaded."""

    def train_step(self, example: TrainingExample) -> float:
        """Learn from one lesson: the loss before. Raises BackendError when the model cannot be trained."""

    def count_hits(self, tokens: Sequence[int], first: int, *, adapted: bool) -> int:
        """How many of `tokens` from index `first` on are the model's best after those before them."""

    def adapter_weights(self) -> dict[str, NDArray[np.float32]]:
        """What was learnt."""

    def load_adapter(self, weights: Mapping[str, NDArray[np.float32]]) -> bool:
        """Go on from what `weights` gave; False when it does not fit, and nothing changed."""

    def release_thread_state(self) -> None:
        """Let go of what is kept for this thread, which may be about to end."""


class Trainable(LanguageModel, Protocol):
    """A model whose `facts.capabilities.trainable`."""

    def trainer(self) -> Trainer:
        """The one that teaches this model. Raises CapabilityError where it has no layers to adapt."""
