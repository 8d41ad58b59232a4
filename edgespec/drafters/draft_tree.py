"""A draft model's tree while it grows: what is drafted, and the part of it that the draft model runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.distribution import Distribution
from edgespec.engine.tree import TokenTree, TreeBuilder

__all__ = ["DraftTree"]


class DraftTree:
    """What is drafted after the last token, in the order it was drawn, and what the draft model runs of it.

    lag: the tokens the draft model has not run yet, the last one included.
    drafted: what was drawn; node 0 is the root. values: the chance of each node to be accepted, in [0, 1],
    as the growth judges it.
    ran: the tree the draft model is given: the lag, then what grows from there. done: how many of its nodes
    the model has run. places: where each node of `drafted` stands in it; None for one that grows no further.
    looked_at: the draft's largest probabilities after a node, and the tokens drawn there.
    """

    def __init__(self, last_token: int, lag: Sequence[int]) -> None:
        self.drafted = TreeBuilder([last_token])
        self.values = [1.0]
        self.ran = TreeBuilder(lag)
        self.done = 0
        self.places: list[int | None] = [len(lag) - 1]
        self.looked_at: dict[int, tuple[NDArray[np.float64], list[int]]] = {}
        self._lag = len(lag)

    def add(self, parent: int, token: int, law: Distribution | None, value: float, runs: bool) -> int:
        """Draft a token below `parent`, drawn from `law`; which node it is.

        value: the chance that it is accepted, all its ancestors included. runs: the draft model is to run
        it, which it can only below a node that it runs.
        """
        above = self.places[parent]
        self.places.append(self.ran.add(above, token) if runs and above is not None else None)
        self.values.append(value)
        return self.drafted.add(parent, token, law)

    def path_tokens(self, node: int) -> list[int]:
        """The tokens after the root down to `node`."""
        return [self.drafted.tokens[at] for at in self.drafted.path(node)]

    def walk(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The drafted nodes on the way down `tokens`, the root first."""
        return self.drafted.build().walk(tokens)

    def ran_path(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """What the model has run: its lag after the first token, then these nodes up to one it lacks."""
        path = list(range(1, self._lag))
        for node in nodes:
            place = self.places[node]
            if place is None or place >= self.done:
                break
            path.append(place)
        return tuple(path)

    def tree(self, block: bool) -> TokenTree:
        """What is proposed. Nodes that were to run come first: a target can take over what ran of them.

        Siblings keep their order, for those that run are the first of them. Where a node stands does not
        depend on its own token, so it may be cut off by its place.
        """
        order = sorted(range(len(self.drafted)), key=lambda node: self.places[node] is None)
        return self.drafted.build(block).subtree(order)
