"""Proposals of several drafters as one tree, and the part of it that pays for its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.auto.acceptance_stats import MOST_SURE
from edgespec.costs.curve import Curve
from edgespec.costs.pass_limits import PassLimits
from edgespec.engine.tree import TokenTree, TreeBuilder

__all__ = ["Merged", "merged", "trimmed"]


@dataclass(frozen=True, slots=True)
class Merged:
    """One tree of several. places[i][n]: where node n of the i-th tree stands in it."""

    tree: TokenTree
    places: tuple[tuple[int, ...], ...]


def merged(trees: Sequence[TokenTree]) -> Merged:
    """One tree of all proposals; they share a root.

    A guess for certain that stands there already is the same node. One with a law is a further try of
    its own, because the residual after it depends on that law (SpecInfer, arXiv 2305.09781). Trees with
    laws come first: whether a certain guess is new may then depend on what they drew.
    """
    drafted = [tree for tree in trees if tree.drafted]
    if len(drafted) < 2:
        only = drafted[0] if drafted else trees[0]
        return Merged(only, tuple(tuple(range(tree.width)) for tree in trees))
    built = TreeBuilder(trees[0].tokens[:1])
    places: list[list[int]] = [[0] for _ in trees]
    for i in sorted(range(len(trees)), key=lambda i: all(law is None for law in trees[i].draft_probs)):
        tree = trees[i]
        for node in range(1, tree.width):
            parent, token, law = places[i][tree.parents[node]], tree.tokens[node], tree.draft_probs[node]
            known = built.child(parent, token) if law is None else None
            places[i].append(built.add(parent, token, law) if known is None else known)
    return Merged(built.build(), tuple(tuple(place) for place in places))


def trimmed(
    joined: Merged,
    chances: Sequence[Sequence[float]],
    optional: Sequence[bool],
    limits: PassLimits,
    curve: Curve,
    spent: float,
) -> TokenTree:
    """The tree without those nodes of optional proposals that do not pay for their rows, or do not fit.

    Of the rest, the likeliest are taken that make (1 + the sum of path values) / (spent + v(rows)) largest,
    as Sequoia sizes a tree (arXiv 2402.12374), with v not monotone. All other nodes stay.
    chances[i][n]: that node n of the i-th tree is accepted after its parent, in [0, 1]. optional[i]: its
    guesses are certain, and any of them may go. spent: plain steps that the draft cost.
    """
    tree = joined.tree
    own = [0.0] * tree.width
    stays = [False] * tree.width
    for place, chance, may_go in zip(joined.places, chances, optional, strict=True):
        for node, at in enumerate(place):
            own[at] = max(own[at], chance[node])
            stays[at] |= not may_go or at == 0
    if all(stays):
        return tree
    values = _path_values(tree, own, stays)
    kept = {node for node in range(tree.width) if stays[node]}
    parents = {tree.parents[node] for node in kept}
    leaves, tokens = len(kept - parents), sum(values[node] for node in kept)
    best, size, extra = tokens / (spent + curve(len(kept))), 0, list[int]()
    for node in sorted(set(range(tree.width)) - kept, key=lambda node: (-values[node], node)):
        parent = tree.parents[node]
        forks = parent in parents
        if parent not in kept or len(kept) >= limits.max_width or leaves + forks > limits.max_branches:
            continue
        kept.add(node)
        parents.add(parent)
        extra.append(node)
        leaves, tokens = leaves + forks, tokens + values[node]
        speed = tokens / (spent + curve(len(kept)))
        if speed > best:
            best, size = speed, len(extra)
    kept -= set(extra[size:])
    return tree if len(kept) == tree.width else tree.subtree(sorted(kept))


def _path_values(tree: TokenTree, own: Sequence[float], stays: Sequence[bool]) -> list[float]:
    """The chance of each node to be accepted, its ancestors included, in [0, 1]; `own`: after its parent.

    An optional guess of chance c beside siblings that stay, of chance r together, contradicts them: no two
    are right. Were the drafters independent of each other, the chance that it is right, given that not
    both are, is c (1 - r) / (1 - c r) (Bayes' rule).
    """
    rivals = [0.0] * tree.width
    for node in range(1, tree.width):
        if stays[node]:
            rivals[tree.parents[node]] = min(rivals[tree.parents[node]] + own[node], MOST_SURE)
    values = [1.0]
    for node in range(1, tree.width):
        chance, rival = own[node], rivals[tree.parents[node]]
        if not stays[node]:
            chance = chance * (1.0 - rival) / (1.0 - chance * rival)
        values.append(values[tree.parents[node]] * chance)
    return values
