"""Several drafters at once: their proposals in one tree, verified in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.drafters.base import Drafter
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.distribution import Distribution
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["CombinedDrafter", "merged"]


class CombinedDrafter(Drafter):
    """Asks every drafter each round and merges what they say.

    can_branch: False for a target that verifies chains only; then the first drafter with a guess wins.
    """

    def __init__(self, drafters: Sequence[Drafter], can_branch: bool) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self._drafters = tuple(drafters)
        self._can_branch = can_branch
        self.extra_weight_bytes = sum(drafter.extra_weight_bytes for drafter in drafters)
        self.extra_kv_bytes = sum(drafter.extra_kv_bytes for drafter in drafters)

    def begin(self, tokens: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        trees = []
        for drafter in self._drafters:
            tree = drafter.propose(sampler, acceptance, draft_length)
            if tree.drafted and not self._can_branch:
                return tree
            trees.append(tree)
        return merged(trees)

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        for drafter in self._drafters:
            drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for drafter in self._drafters:
            drafter.commit(tokens)

    def rest(self, wanted: Callable[[], bool]) -> None:
        for drafter in self._drafters:
            drafter.rest(wanted)

    def interrupt(self, wanted: bool) -> None:
        for drafter in self._drafters:
            drafter.interrupt(wanted)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def merged(trees: Sequence[TokenTree]) -> TokenTree:
    """One tree of all proposals; they share a root.

    A guess for certain that stands there already is the same node. One with a law is a further try of
    its own, because the residual after it depends on that law (SpecInfer, arXiv 2305.09781). Trees with
    laws come first: whether a certain guess is new may then depend on what they drew.
    """
    drafted = [tree for tree in trees if tree.drafted]
    if len(drafted) < 2:
        return drafted[0] if drafted else trees[0]
    tokens: list[int] = [trees[0].tokens[0]]
    parents: list[int] = [-1]
    laws: list[Distribution | None] = [None]
    children: dict[tuple[int, int], int] = {}
    for tree in sorted(drafted, key=lambda t: all(law is None for law in t.laws)):
        places = [0]
        for node in range(1, tree.width):
            parent, token, law = places[tree.parents[node]], tree.tokens[node], tree.laws[node]
            place = children.get((parent, token)) if law is None else None
            if place is None:
                place = len(tokens)
                tokens.append(token)
                parents.append(parent)
                laws.append(law)
                children.setdefault((parent, token), place)
            places.append(place)
    return TokenTree(tuple(tokens), tuple(parents), tuple(laws))
