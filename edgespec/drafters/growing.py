"""A draft model's tree while it grows: what is drafted, and the part of it that the draft model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.distribution import Distribution
from edgespec.engine.tree import TokenTree

__all__ = ["Growing", "Ran"]


class Ran:
    """The tree a draft model is given: the tokens it had not run yet, root last, and what grows from there.

    done: how many of its nodes the model has run.
    """

    def __init__(self, lag: Sequence[int]) -> None:
        self.tokens = list(lag)
        self.parents = list(range(-1, len(lag) - 1))
        self.done = 0

    def add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents), (None,) * len(self.tokens))


@dataclass(slots=True)
class Growing:
    """What is drafted, in the order it was drawn; node 0 is the root.

    place: where a node stands in `ran`; None for a node that does not grow further.
    values: the chance of a node to be accepted, as the growth judges it.
    looked_at: the draft's largest probabilities after a node, and the tokens drawn there.
    """

    ran: Ran
    tokens: list[int]
    place: list[int | None]
    parents: list[int] = field(default_factory=lambda: [-1])
    laws: list[Distribution | None] = field(default_factory=lambda: [None])
    values: list[float] = field(default_factory=lambda: [1.0])
    looked_at: dict[int, tuple[NDArray[np.float64], list[int]]] = field(default_factory=dict)

    def add(self, parent: int, token: int, law: Distribution | None, value: float, runs: bool) -> int:
        above = self.place[parent]
        self.place.append(self.ran.add(above, token) if runs and above is not None else None)
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(law)
        self.values.append(value)
        return len(self.tokens) - 1

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, or None."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return next((child for child, pair in enumerate(pairs) if pair == (node, token)), None)

    def path(self, node: int) -> list[int]:
        """The tokens after the root down to `node`."""
        path = []
        while node > 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def ran_path(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The nodes of `ran` on the way down `tokens`, as far as the model has run them."""
        path = list(range(1, (self.place[0] or 0) + 1))
        node = 0
        for token in tokens:
            child = self.child(node, token)
            place = None if child is None else self.place[child]
            if child is None or place is None or place >= self.ran.done:
                break
            path.append(place)
            node = child
        return tuple(path)

    def tree(self, block: bool) -> TokenTree:
        """What is proposed. Nodes that were to run come first: a target can take over what ran of them.

        Siblings keep their order, for those that run are the first of them. Where a node stands does not
        depend on its own token, so it may be cut off by its place.
        """
        order = sorted(range(len(self.tokens)), key=lambda node: self.place[node] is None)
        at = {node: i for i, node in enumerate(order)}
        return TokenTree(
            tuple(self.tokens[node] for node in order),
            (-1, *(at[self.parents[node]] for node in order[1:])),
            tuple(self.laws[node] for node in order),
            block,
        )
