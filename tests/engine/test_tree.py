"""The token tree: shape, lookups, and cutting it down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.tree import TokenTree


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    width = draw(st.integers(1, 14))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, width)))
    tokens = (1, *(draw(st.integers(-2, 9)) for _ in range(1, width)))
    return TokenTree(tokens, parents, (None,) * width)


class TestShape:
    def test_a_chain(self) -> None:
        tree = TokenTree.chain(7, [1, 2])
        assert (tree.width, tree.drafted, tree.leaves, tree.depths) == (3, 2, 1, (0, 1, 2))
        assert tree.is_chain
        assert tree.child(1, 2) == 2
        assert tree.child(1, 1) is None

    def test_siblings_keep_the_order_they_were_drawn_in(self) -> None:
        tree = TokenTree((7, 3, 1, 2), (-1, 0, 0, 1), (None,) * 4)
        assert tree.children(0) == [1, 2]
        assert tree.leaves == 2
        assert not tree.is_chain

    @given(trees())
    def test_leaves_and_depths(self, tree: TokenTree) -> None:
        assert tree.leaves == sum(not tree.children(node) for node in range(tree.width))
        assert all(tree.depths[n] == tree.depths[tree.parents[n]] + 1 for n in range(1, tree.width))


class TestPruning:
    @given(trees(), st.integers(0, 5), st.integers(1, 15), st.integers(1, 5))
    def test_what_stays_fits_and_is_part_of_the_tree(
        self, tree: TokenTree, depth: int, width: int, branches: int
    ) -> None:
        cut = tree.pruned(8, depth, width, branches)
        assert cut.tokens[0] == tree.tokens[0]
        assert cut.width <= width
        assert cut.leaves <= branches
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
    def test_what_fits_is_left_alone(self, tree: TokenTree) -> None:
        kept = tree.pruned(100, 20)
        if min(tree.tokens) >= 0:
            assert kept is tree

    @given(trees(), st.integers(0, 5), st.integers(1, 15), st.integers(1, 5), st.data())
    def test_a_node_never_stays_or_goes_for_its_own_token(
        self, tree: TokenTree, depth: int, width: int, branches: int, data: st.DataObject
    ) -> None:
        """Only the tokens outside the vocabulary do; a law never covers them."""
        tokens = tuple(abs(token) % 8 for token in tree.tokens)
        tree = TokenTree(tokens, tree.parents, tree.laws)
        changed = TokenTree(
            (tokens[0], *(data.draw(st.integers(0, 7)) for _ in tokens[1:])), tree.parents, tree.laws
        )
        assert (
            tree.pruned(8, depth, width, branches).parents
            == changed.pruned(8, depth, width, branches).parents
        )

    @pytest.mark.parametrize("block", [True, False])
    def test_a_block_stays_a_block(self, block: bool) -> None:
        tree = TokenTree((1, 2, 3, 4), (-1, 0, 1, 2), (None,) * 4, block)
        assert tree.pruned(9, 2).block is block
