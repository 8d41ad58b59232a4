"""Rules for the shape of a draft model's token tree, and the fixed shapes among them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Children", "DraftProbs", "FixedShape", "TreeGrowth"]

# Returns the draft model's largest probabilities after the i-th frontier node, in descending order.
DraftProbs: TypeAlias = Callable[[int], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Children:
    """Number of children to draft below one node.

    The number is fixed before the tokens are drawn. Dropping a token after the draw would bias rejection
    mode.

    Attributes:
        path_probs: One value per child: the estimated probability that the child and all its ancestors are
            accepted.
        expand_count: Number of children, counted from the most likely, that may get children of their own.
    """

    path_probs: tuple[float, ...]
    expand_count: int


class TreeGrowth(ABC):
    """Rule that decides level by level how a draft model's tree grows. Each drafter owns one.

    A round calls `begin_round`, `grow_level` after each pass of the draft model, `finish_draft`,
    `record_verify_pass`, and `record_outcome` for each node whose next token is known. If `begin_round`
    returns False, the round calls `record_skipped_round` and nothing else.

    Attributes:
        siblings: Children per node that `record_outcome` reports, whether or not they were drafted.
        chooses_length: The rule may end a draft before the draft length is reached.
    """

    siblings: int = 1
    chooses_length: bool = False

    @abstractmethod
    def begin_round(self, draft_length: int) -> bool:
        """Begin a round of at most `draft_length` draft passes; return False to skip drafting."""

    @abstractmethod
    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        """Return the children of each frontier node.

        Args:
            path_probs: Estimated probability of each frontier node that its path is accepted.
            draft_probs: The draft model's largest probabilities after a frontier node.
        """

    def force_draft(self) -> None:  # noqa: B027
        """Make a short draft in the next round even where none is expected to save time."""

    def finish_draft(self) -> None:  # noqa: B027
        """Record that the draft is complete and the target's pass begins."""

    def record_verify_pass(self, width: int) -> None:  # noqa: B027
        """Record that the target has verified `width` tokens since `finish_draft`."""

    def record_outcome(self, probs: NDArray[np.float64], accepted: int | None) -> None:  # noqa: B027
        """Record which child of a node the target chose.

        Args:
            probs: The draft model's largest probabilities after the node, float64, descending.
            accepted: Index of the chosen child; None where the target chose another token.
        """

    def record_skipped_round(self) -> None:  # noqa: B027
        """Record a round without a draft."""

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return what was learned about acceptance and cost, as named arrays for a later run."""
        return {}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Continue from the arrays of `saved_statistics`.

        Raises:
            KeyError: An array is missing.
            ValueError: An array holds impossible values.
        """


class FixedShape(TreeGrowth):
    """A tree with a fixed number of children per node at each depth.

    Args:
        branches: Children per node at each depth, such as (3, 2). Deeper levels get one child, so an empty
            tuple is a chain.
    """

    def __init__(self, branches: tuple[int, ...] = ()) -> None:
        self._branches = branches
        self._depth = 0

    def begin_round(self, draft_length: int) -> bool:
        self._depth = 0
        return True

    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        count = self._branches[self._depth] if self._depth < len(self._branches) else 1
        self._depth += 1
        return [Children((1.0,) * count, count)] * len(path_probs)
