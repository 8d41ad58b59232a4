"""Proposals in one tree: every path is there, drawn ones keep their laws, and what goes is what may."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.sampling import Distribution
from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.combined_drafter import merge_trees, prune_optional
from edgespec.methods.costs.curve import PassLimits, assumed_cost

LAW = Distribution(np.arange(3), np.array([0.2, 0.3, 0.5]))


@st.composite
def trees(draw: st.DrawFn, laws: tuple[Distribution | None, ...] = (None, LAW)) -> TokenTree:
    """Return any tree below the root 9 with distinct siblings."""
    law = draw(st.sampled_from(laws))
    tokens, parents = [9], [-1]
    for _ in range(draw(st.integers(0, 7))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 3))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents), (None, *[law] * (len(tokens) - 1)))


def path(tree: TokenTree, node: int) -> tuple[int, ...]:
    tokens = []
    while node:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(tokens[::-1])


class TestMergeTrees:
    def test_equal_greedy_tokens_share_a_node(self) -> None:
        tree = merge_trees([TokenTree.chain(9, [1, 2, 3]), TokenTree.chain(9, [1, 2, 4, 5])]).tree
        assert tree.tokens == (9, 1, 2, 3, 4, 5)
        assert tree.parents == (-1, 0, 1, 2, 2, 4)
        assert not tree.block_verifiable

    def test_drawn_tokens_come_first_and_keep_their_distributions(self) -> None:
        drawn = TokenTree.chain(9, [1, 2], [LAW, LAW])
        joined = merge_trees([TokenTree.chain(9, [2, 0]), drawn])
        assert joined.tree.tokens == (9, 1, 2, 2, 0)
        assert joined.tree.draft_probs == (None, LAW, LAW, None, None)
        assert joined.node_maps == ((0, 3, 4), (0, 1, 2))

    def test_a_single_tree_is_unchanged(self) -> None:
        chain: Any = TokenTree.chain(9, [1, 2], [LAW, LAW])
        assert merge_trees([TokenTree.chain(9), chain]).tree is chain
        assert merge_trees([TokenTree.chain(9), TokenTree.chain(9)]).tree.drafted == 0

    def test_a_merged_chain_is_no_block(self) -> None:
        drawn = TokenTree.chain(9, [1, 2], [LAW, LAW])
        tree = merge_trees([drawn, TokenTree.chain(9, [1, 2])]).tree
        assert tree.is_chain
        assert not tree.block_verifiable

    @given(st.lists(trees(), min_size=1, max_size=4))
    def test_every_input_path_is_in_the_merged_tree(self, proposals: list[TokenTree]) -> None:
        joined = merge_trees(proposals)
        for tree, places in zip(proposals, joined.node_maps, strict=True):
            for node in range(tree.width):
                assert path(joined.tree, places[node]) == path(tree, node)
                assert (
                    tree.draft_probs[node] is joined.tree.draft_probs[places[node]]
                    or tree.draft_probs[node] is None
                )
        drawn = sum(tree.drafted for tree in proposals if tree.draft_probs[-1] is not None)
        assert sum(law is not None for law in joined.tree.draft_probs) == drawn

    @given(trees((None,)), st.lists(trees((None,)), max_size=3))
    def test_nodes_of_the_first_tree_come_first(self, first: TokenTree, others: list[TokenTree]) -> None:
        """So the target can reuse the computation of a self-draft."""
        tree = merge_trees([first, *others]).tree
        assert tree.tokens[: first.width] == first.tokens
        assert tree.parents[: first.width] == first.parents


class TestPruneOptional:
    @given(
        st.lists(st.tuples(trees(), st.floats(0.0, 1.0)), min_size=1, max_size=4),
        st.integers(1, 12),
        st.integers(1, 5),
        st.lists(st.floats(0.5, 4.0), min_size=40, max_size=40),
    )
    def test_only_optional_nodes_are_pruned_and_limits_hold(
        self, said: list[tuple[TokenTree, float]], width: int, leaves: int, curve: list[float]
    ) -> None:
        proposals = [tree for tree, _ in said]
        optional = [range(tree.width if tree.draft_probs[-1] is None else 0) for tree in proposals]
        joined = merge_trees(proposals)
        chances = [[1.0, *[chance] * tree.drafted] for tree, chance in said]
        tree = prune_optional(
            joined, chances, optional, PassLimits(width, leaves), lambda rows: curve[rows - 1], 0.1
        )
        paths = [(path(tree, node), tree.draft_probs[node]) for node in range(tree.width)]
        whole = [
            (path(joined.tree, node), joined.tree.draft_probs[node]) for node in range(joined.tree.width)
        ]
        rest = iter(whole)
        assert all(any(each == other for other in rest) for each in paths), "not the same order"
        firm = [each for each, may_go in zip(proposals, optional, strict=True) if not may_go]
        fixed = merge_trees(firm or [TokenTree.chain(9)]).tree
        held = [(path(fixed, node), fixed.draft_probs[node]) for node in range(fixed.width)]
        assert all(paths.count(each) >= held.count(each) for each in held)
        assert tree.width <= max(width, fixed.width)
        assert tree.leaf_count <= max(leaves, fixed.leaf_count)

    def test_unlikely_nodes_are_pruned(self) -> None:
        proposals = [TokenTree.chain(9, [1, 1]), TokenTree.chain(9, [2, 2])]
        for chance, width in ((0.02, 3), (0.9, 5)):
            chances = [[1.0, 0.5, 0.5], [1.0, chance, chance]]
            tree = prune_optional(
                merge_trees(proposals), chances, [(), {1, 2}], PassLimits(), assumed_cost, 0.2
            )
            assert tree.width == width

    def test_a_single_lookup_is_pruned_where_rows_are_expensive(self) -> None:
        chain, chances = TokenTree.chain(9, [1] * 6), [[1.0, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1]]
        merged, optional = merge_trees([chain]), [range(7)]
        assert prune_optional(merged, chances, optional, PassLimits(), assumed_cost, 0.0).drafted == 3
        assert prune_optional(merged, chances, optional, PassLimits(), float, 0.0).drafted == 0

    def test_an_optional_node_stays_before_one_that_is_not(self) -> None:
        chain, chances = TokenTree.chain(9, [1] * 4), [[1.0, 0.1, 0.1, 0.1, 0.1]]
        tree = prune_optional(merge_trees([chain]), chances, [{1, 2, 4}], PassLimits(), float, 0.0)
        assert tree.drafted == 3
