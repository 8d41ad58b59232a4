"""Rules that determine the shape of a draft tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Children", "DraftProbs", "FixedShape", "TreeGrowth"]

# Function that returns the draft model's highest next-token probabilities after a node, in descending order.
DraftProbs: TypeAlias = Callable[[int], NDArray[np.float64]]


class Children(NamedTuple):
    """How many children to draft for a node of a tree, and how many of them get children themselves.

    Both numbers are chosen before any token is sampled, because dropping a sampled token would bias rejection
    sampling.

    Attributes:
        path_probs: For each child, the estimated probability that the child and all its ancestors are
            accepted.
        expand_count: Number of children that get children themselves, starting with the most likely.
    """

    path_probs: tuple[float, ...]
    expand_count: int


class TreeGrowth(ABC):
    """Decides how a draft tree grows, one level at a time. Each drafter has its own instance.

    The drafter calls `begin_round` before drafting, `grow_level` after each draft model pass, and
    `finish_draft` when the draft is complete. After verification, it calls `record_verify_pass` and
    `record_outcome`.

    Attributes:
        drafts_chains: Whether no node has more than one child.
        siblings: Minimum number of candidate tokens to sample for each node.
        chooses_length: Whether a draft may end before it reaches the draft length.
    """

    drafts_chains: bool
    siblings: int = 1
    chooses_length: bool = False

    @abstractmethod
    def begin_round(self, draft_length: int) -> bool:
        """Begin a round with at most `draft_length` draft model passes. Return False to skip drafting."""

    @abstractmethod
    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        """Return the children to add to each node of the current level.

        Args:
            path_probs: For each node of the current level, the estimated probability that the node and all
                its ancestors are accepted.
            draft_probs: Returns the draft model's highest next-token probabilities after a node of the
                current level.
        """

    def force_draft(self) -> None:  # noqa: B027
        """Make the next draft short but not empty, even if drafting is not expected to save time."""

    def finish_draft(self) -> None:  # noqa: B027
        """Record the time at which the draft was completed and the verify pass begins."""

    def record_verify_pass(self, width: int) -> None:  # noqa: B027
        """Record that the target has just verified `width` tokens, including the root of the draft tree."""

    def record_outcome(self, probs: NDArray[np.float64], accepted: int | None) -> None:  # noqa: B027
        """Record which child of a draft tree node the target accepted.

        Args:
            probs: The draft model's highest probabilities after the node, float64, in descending order.
            accepted: Index of the accepted child, or None if the target chose another token.
        """

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return acceptance and timing statistics as named arrays, to save for a later run."""
        return {}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Restore the statistics returned by `saved_statistics`. See `Drafter.restore_statistics`."""


class FixedShape(TreeGrowth):
    """A tree with a fixed number of children per node at each depth.

    Args:
        branches: Number of children per node at each depth, such as (3, 2). Deeper nodes have one child, so
            an empty tuple gives a chain.
    """

    def __init__(self, branches: tuple[int, ...] = ()) -> None:
        self.drafts_chains = set(branches) <= {1}
        self._branches = branches
        self._depth = 0

    def begin_round(self, draft_length: int) -> bool:
        self._depth = 0
        return True

    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        count = self._branches[self._depth] if self._depth < len(self._branches) else 1
        self._depth += 1
        return [Children((1.0,) * count, count)] * len(path_probs)
