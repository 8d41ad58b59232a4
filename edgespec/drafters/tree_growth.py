"""Rules that determine the shape of a draft tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Children", "DraftProbs", "FixedShape", "TreeGrowth"]

# Given the index of a frontier node, returns the draft model's highest probabilities for the next token, in
# descending order.
DraftProbs: TypeAlias = Callable[[int], NDArray[np.float64]]


class Children(NamedTuple):
    """How many children to draft for one node, and how many of them to expand.

    Both numbers are chosen before any token is drawn, because dropping a drawn token would bias rejection
    sampling.

    Attributes:
        path_probs: For each child, the estimated probability that the child and all its ancestors are
            accepted.
        expand_count: Number of children to expand, starting with the most likely.
    """

    path_probs: tuple[float, ...]
    expand_count: int


class TreeGrowth(ABC):
    """A rule that decides, level by level, how a draft tree grows. Each drafter has its own instance.

    Each draft-and-verify round calls `begin_round`, `grow_level` after each draft model pass, `finish_draft`,
    `record_verify_pass`, and `record_outcome` for each node whose next token is known. If `begin_round`
    returns False, drafting is skipped and none of the other methods is called.

    Attributes:
        drafts_chains: Whether all trees are chains.
        siblings: Minimum number of candidate tokens to choose for each node. `record_outcome` covers all of
            them, even if the tree contains fewer.
        chooses_length: Whether the rule may end a draft before it reaches the draft length.
    """

    drafts_chains: bool
    siblings: int = 1
    chooses_length: bool = False

    @abstractmethod
    def begin_round(self, draft_length: int) -> bool:
        """Begin a round with at most `draft_length` draft passes. Return False to skip drafting."""

    @abstractmethod
    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        """Return the children of each frontier node.

        Args:
            path_probs: For each frontier node, the estimated probability that it and its ancestors are
                accepted.
            draft_probs: Returns the draft model's highest probabilities after a frontier node.
        """

    def force_draft(self) -> None:  # noqa: B027
        """Make the next draft a short one, even if it is not expected to save time."""

    def finish_draft(self) -> None:  # noqa: B027
        """Record that the draft is complete and the verify pass begins."""

    def record_verify_pass(self, width: int) -> None:  # noqa: B027
        """Record that the target has verified `width` tokens since `finish_draft`."""

    def record_outcome(self, probs: NDArray[np.float64], accepted: int | None) -> None:  # noqa: B027
        """Record which child of a node the target accepted.

        Args:
            probs: The draft model's highest probabilities after the node, float64, in descending order.
            accepted: Index of the accepted child, or None if the target chose another token.
        """

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return acceptance and cost statistics as named arrays to save for a later run."""
        return {}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Restore the statistics. See `BudgetedDrafter.restore_statistics`."""


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
