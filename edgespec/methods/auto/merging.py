"""Merge the trees of several drafters, and prune tokens that are not worth a wider pass."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.methods.auto.constants import MAX_PROB_SUM
from edgespec.methods.costs.curve import CostFunction
from edgespec.methods.costs.pass_limits import PassLimits

__all__ = ["MergedTree", "merge_trees", "prune_optional"]


class MergedTree(NamedTuple):
    """Several draft trees merged into one. `node_maps[i][n]` is the merged node for node n of tree i."""

    tree: TokenTree
    node_maps: tuple[tuple[int, ...], ...]


def merge_trees(trees: Sequence[TokenTree]) -> MergedTree:
    """Merge draft trees that share a root into one.

    Siblings with the same token become one node, unless they were sampled (SpecInfer, arXiv 2305.09781).
    """
    drafted = [tree for tree in trees if tree.drafted]
    if len(drafted) < 2:
        only = drafted[0] if drafted else trees[0]
        return MergedTree(only, tuple(tuple(range(tree.width)) for tree in trees))
    builder = TreeBuilder(trees[0].tokens[:1])
    node_maps: list[list[int]] = [[0] for _ in trees]
    for i in sorted(range(len(trees)), key=lambda i: all(probs is None for probs in trees[i].draft_probs)):
        tree = trees[i]
        for node in range(1, tree.width):
            parent, token, probs = node_maps[i][tree.parents[node]], tree.tokens[node], tree.draft_probs[node]
            existing = builder.child(parent, token) if probs is None else None
            node_maps[i].append(builder.add(parent, token, probs) if existing is None else existing)
    return MergedTree(builder.build(), tuple(map(tuple, node_maps)))


def prune_optional(
    merged: MergedTree,
    node_probs: Sequence[Sequence[float]],
    optional: Sequence[Container[int]],
    limits: PassLimits,
    v: CostFunction,
    draft_cost: float,
) -> TokenTree:
    """Return a merged tree without optional nodes that exceed the limits or are unlikely to be accepted.

    The most likely optional nodes are kept, up to the number that maximises the expected decoding speed S =
    (1 + sum of path probabilities) / (draft cost + v(rows)), as in Sequoia (arXiv 2402.12374).

    Args:
        merged: The merged tree.
        node_probs: For each input tree and node, the acceptance probability given that the parent is
            accepted.
        optional: For each input tree, the nodes that may be dropped unless a node below them is kept.
        limits: Maximum width and number of branches of a verify pass.
        v: Returns the duration of a verify pass of a given width, relative to a single-token target pass.
        draft_cost: Duration of drafting, relative to a single-token target pass.
    """
    tree = merged.tree
    probs = [0.0] * tree.width
    is_required = [False] * tree.width
    for node_map, tree_probs, tree_optional in zip(merged.node_maps, node_probs, optional, strict=True):
        for node, merged_node in enumerate(node_map):
            probs[merged_node] = max(probs[merged_node], tree_probs[node])
            is_required[merged_node] |= node not in tree_optional or merged_node == 0
    for node in range(tree.width - 1, 0, -1):
        is_required[tree.parents[node]] |= is_required[node]
    if all(is_required):
        return tree
    path_probs = _path_probs(tree, probs, is_required)
    kept = {node for node in range(tree.width) if is_required[node]}
    parents = {tree.parents[node] for node in kept}
    leaves, tokens = len(kept - parents), sum(path_probs[node] for node in kept)
    best_speed, best_count, added = tokens / (draft_cost + v(len(kept))), 0, list[int]()
    for node in sorted(set(range(tree.width)) - kept, key=lambda node: (-path_probs[node], node)):
        parent = tree.parents[node]
        forks = parent in parents
        if parent not in kept or len(kept) >= limits.max_width or leaves + forks > limits.max_branches:
            continue
        kept.add(node)
        parents.add(parent)
        added.append(node)
        leaves, tokens = leaves + forks, tokens + path_probs[node]
        speed = tokens / (draft_cost + v(len(kept)))
        if speed > best_speed:
            best_speed, best_count = speed, len(added)
    kept -= set(added[best_count:])
    return tree if len(kept) == tree.width else tree.subtree(sorted(kept))


def _path_probs(tree: TokenTree, probs: Sequence[float], is_required: Sequence[bool]) -> list[float]:
    """Return the probability of each node that it and all its ancestors are accepted.

    A prunable node is accepted only if all of its required siblings are rejected.
    """
    required_sums = [0.0] * tree.width
    for node in range(1, tree.width):
        if is_required[node]:
            parent = tree.parents[node]
            required_sums[parent] = min(required_sums[parent] + probs[node], MAX_PROB_SUM)
    path_probs = [1.0]
    for node in range(1, tree.width):
        prob, required = probs[node], required_sums[tree.parents[node]]
        if not is_required[node]:
            prob = prob * (1.0 - required) / (1.0 - prob * required)
        path_probs.append(path_probs[tree.parents[node]] * prob)
    return path_probs
