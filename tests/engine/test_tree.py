"""The token tree: shape, lookups, pruning and building."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.tree import TokenTree, TreeBuilder


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    width = draw(st.integers(1, 14))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, width)))
    tokens = (1, *(draw(st.integers(-2, 9)) for _ in range(1, width)))
    return TokenTree(tokens, parents, (None,) * width)


class TestShape:
    def test_a_chain(self) -> None:
        tree = TokenTree.chain(7, [1, 2])
        assert (tree.width, tree.drafted, tree.leaf_count, tree.depths) == (3, 2, 1, (0, 1, 2))
        assert tree.is_chain
        assert tree.child(1, 2) == 2
        assert tree.child(1, 1) is None

    def test_siblings_keep_the_order_they_were_drawn_in(self) -> None:
        tree = TokenTree((7, 3, 1, 2), (-1, 0, 0, 1), (None,) * 4)
        assert tree.children(0) == [1, 2]
        assert tree.leaf_count == 2
        assert not tree.is_chain

    @given(trees())
    def test_leaves_and_depths(self, tree: TokenTree) -> None:
        assert tree.leaf_count == sum(not tree.children(node) for node in range(tree.width))
        assert all(tree.depths[n] == tree.depths[tree.parents[n]] + 1 for n in range(1, tree.width))


def path(tree: TokenTree, node: int) -> list[int]:
    """Return the nodes from the root to `node`, without the root."""
    return [*path(tree, tree.parents[node]), node] if node else []


class TestWalking:
    @given(trees(), st.data())
    def test_walk_follows_tokens_as_far_as_they_match(self, tree: TokenTree, data: st.DataObject) -> None:
        tokens = data.draw(st.lists(st.integers(-2, 9), max_size=5))
        walked = tree.walk(tokens)
        assert walked[0] == 0
        assert [tree.parents[node] for node in walked[1:]] == list(walked[:-1])
        assert [tree.tokens[node] for node in walked[1:]] == tokens[: len(walked) - 1]
        if len(walked) <= len(tokens):
            assert tree.child(walked[-1], tokens[len(walked) - 1]) is None

    @given(trees(), st.data())
    def test_walk_from_any_node(self, tree: TokenTree, data: st.DataObject) -> None:
        node = data.draw(st.integers(0, tree.width - 1))
        tokens = [tree.tokens[at] for at in path(tree, node)]
        whole = tree.walk(tokens)
        for i, at in enumerate(whole):
            assert tree.walk(tokens[i:], at) == whole[i:]

    @given(trees())
    def test_subtree_in_another_order(self, tree: TokenTree) -> None:
        order = sorted(range(tree.width), key=lambda node: (tree.depths[node], node))
        turned = tree.subtree(order)
        assert sorted(turned.depths) == list(turned.depths)
        for i, node in enumerate(order):
            assert [order[at] for at in path(turned, i)] == path(tree, node)
            assert turned.tokens[i] == tree.tokens[node]


class TestBuilding:
    @given(trees(), st.data())
    def test_added_nodes_are_found(self, tree: TokenTree, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, tree.width))
        built = TreeBuilder()
        for node in range(first):
            assert built.add(tree.parents[node], tree.tokens[node]) == node
        built.extend(tree, first)
        assert built.build() == tree
        assert (len(built), tuple(built.depths)) == (tree.width, tree.depths)
        assert built.is_chain is tree.is_chain
        for node in range(tree.width):
            assert list(built.path(node)) == path(tree, node)
            for token in range(-2, 10):
                assert built.child(node, token) == tree.child(node, token)

    @given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=6))
    def test_paths_share_common_prefixes(self, paths: list[list[int]]) -> None:
        built = TreeBuilder([9])
        ends = [built.add_path(0, tokens) for tokens in paths]
        tree = built.build(block_verifiable=True)
        assert tree.block_verifiable
        for tokens, end in zip(paths, ends, strict=True):
            walked = tree.walk(tokens)
            assert (len(walked), walked[-1]) == (len(tokens) + 1, end)
        beginnings = {tuple(tokens[:i]) for tokens in paths for i in range(len(tokens) + 1)}
        assert tree.width == len(beginnings | {()})

    def test_builder_can_start_with_a_chain(self) -> None:
        assert TreeBuilder([7, 1, 2]).build(block_verifiable=True) == TokenTree.chain(7, [1, 2])
        assert len(TreeBuilder()) == 0

    def test_siblings_may_hold_the_same_token(self) -> None:
        built = TreeBuilder([9])
        assert (built.add(0, 1), built.add(0, 1), built.child(0, 1)) == (1, 2, 1)


class TestPruning:
    @given(trees(), st.integers(0, 5), st.integers(1, 15), st.integers(1, 5))
    def test_pruned_tree_fits_the_limits_and_is_part_of_the_tree(
        self, tree: TokenTree, depth: int, width: int, branches: int
    ) -> None:
        cut = tree.pruned(8, depth, width, branches)
        assert cut.tokens[0] == tree.tokens[0]
        assert cut.width <= width
        assert cut.leaf_count <= branches
        assert max(cut.depths) <= depth
        assert all(0 <= token < 8 for token in cut.tokens)

        def paths(of: TokenTree) -> list[tuple[int, ...]]:
            found: list[tuple[int, ...]] = [()]
            for node in range(1, of.width):
                found.append((*found[of.parents[node]], of.tokens[node]))
            return found

        whole = paths(tree)
        for path in paths(cut):
            whole.remove(path)

    @given(trees())
    def test_a_tree_within_the_limits_is_unchanged(self, tree: TokenTree) -> None:
        kept = tree.pruned(100, 20)
        if min(tree.tokens) >= 0:
            assert kept is tree

    @given(trees(), st.integers(0, 5), st.integers(1, 15), st.integers(1, 5), st.data())
    def test_pruning_does_not_depend_on_the_token_of_a_node(
        self, tree: TokenTree, depth: int, width: int, branches: int, data: st.DataObject
    ) -> None:
        """Tokens outside the vocabulary are the exception, because no distribution contains them."""
        tokens = tuple(abs(token) % 8 for token in tree.tokens)
        tree = TokenTree(tokens, tree.parents, tree.draft_probs)
        changed = TokenTree(
            (tokens[0], *(data.draw(st.integers(0, 7)) for _ in tokens[1:])), tree.parents, tree.draft_probs
        )
        assert (
            tree.pruned(8, depth, width, branches).parents
            == changed.pruned(8, depth, width, branches).parents
        )

    @pytest.mark.parametrize("block", [True, False])
    def test_pruning_keeps_block_verifiable(self, block: bool) -> None:
        tree = TokenTree((1, 2, 3, 4), (-1, 0, 1, 2), (None,) * 4, block)
        assert tree.pruned(9, 2).block_verifiable is block
