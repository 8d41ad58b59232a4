"""How a model's draft grows: what decides that level by level, and a fixed shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Children", "FixedShape", "TreeGrowth"]


@dataclass(frozen=True, slots=True)
class Children:
    """How a node goes on: one child for each of `values`, of which the first `run` may grow further.

    Decided before they are drawn, by what stands before them: what is drawn stays, or rejection mode
    would be biased. values: the chance of each to be accepted, all its ancestors included.
    """

    values: tuple[float, ...]
    run: int


class TreeGrowth(ABC):
    """Decides level by level what a draft model's tree looks like.

    A round is `begins`, `level` after each pass of the draft model, `ends`, `verified`, and `learn` for each
    node whose next token came out; or `begins` that said no, and `idle`. `dare` may come before it.
    siblings: how many children of a node are looked at; those not drafted are learnt from. adapts: it goes
    by what pays.
    """

    siblings: int = 1
    adapts: bool = False

    @abstractmethod
    def begins(self, draft_length: int) -> bool:
        """A round of at most so many passes begins. False when a draft is not worth it."""

    @abstractmethod
    def level(self, values: Sequence[float], probs: Callable[[int], NDArray[np.float64]]) -> list[Children]:
        """The children of the nodes that grow, whose path values are `values`.

        `probs(i)`: the draft's largest probabilities after node i, largest first: float64 [at least one].
        """

    def dare(self) -> None:  # noqa: B027
        """The next draft is made whether it pays or not: to see."""

    def ends(self) -> None:  # noqa: B027
        """The draft is made."""

    def verified(self, rows: int) -> None:  # noqa: B027
        """The target has run a pass of so many rows since `ends`."""

    def learn(self, probs: NDArray[np.float64], accepted: int | None) -> None:  # noqa: B027
        """Of the children looked at where the draft's law was `probs`, this one came true, or none."""

    def kept(self) -> dict[str, NDArray[Any]]:
        """What it has learnt, by name, for another run."""
        return {}

    def restore(self, kept: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Go on from what was kept. Raises KeyError, ValueError for what makes no sense."""

    def idle(self) -> None:  # noqa: B027
        """A draft was not worth it."""


class FixedShape(TreeGrowth):
    """So many children of a node at each depth, such as (3, 2); deeper levels get one. () is a chain."""

    def __init__(self, branches: tuple[int, ...] = ()) -> None:
        self._branches = branches
        self._depth = 0

    def begins(self, draft_length: int) -> bool:
        self._depth = 0
        return True

    def level(self, values: Sequence[float], probs: Callable[[int], NDArray[np.float64]]) -> list[Children]:
        count = self._branches[self._depth] if self._depth < len(self._branches) else 1
        self._depth += 1
        return [Children((1.0,) * count, count)] * len(values)
