"""Separating the tokens that a drafter chose from those that a constraint determines."""

from __future__ import annotations

import pytest

from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.combined_drafter import ChosenTokens
from edgespec.methods.base import ForcedDraft

# Root 9, forced 1, then chosen 2 and 3 side by side. After 2, 4 and 5 are forced and 6 is chosen.
TREE = TokenTree((9, 1, 2, 3, 4, 5, 6), (-1, 0, 1, 1, 2, 4, 5), (None,) * 7)
DRAFT = ForcedDraft(TREE, frozenset({1, 4, 5}))


def test_the_tree_holds_only_chosen_tokens() -> None:
    chosen = ChosenTokens(DRAFT)
    assert (chosen.tree.tokens, chosen.tree.parents) == ((9, 2, 3, 6), (-1, 0, 0, 1))
    assert chosen.nodes == [0, 2, 3, 6]


@pytest.mark.parametrize(
    ("tokens", "emitted"),
    [
        ((), ()),
        ((8,), ()),  # The target wrote the forced token differently, which says nothing about 2 and 3.
        ((1,), ()),
        ((1, 8), (8,)),  # Both choices were rejected.
        ((1, 3, 7), (3, 7)),
        ((1, 2), (2,)),
        ((1, 2, 4, 8), (2,)),
        ((1, 2, 4, 5, 8), (2, 8)),
        ((1, 2, 4, 5, 6, 7), (2, 6, 7)),
    ],
)
def test_the_emitted_tokens_that_could_have_been_chosen(
    tokens: tuple[int, ...], emitted: tuple[int, ...]
) -> None:
    assert ChosenTokens(DRAFT).emitted(tokens) == emitted


def test_a_draft_without_forced_tokens_is_left_as_it_is() -> None:
    tree = TokenTree.chain(9, [1, 2])
    chosen = ChosenTokens(ForcedDraft(tree))
    assert (chosen.tree.tokens, chosen.tree.parents) == (tree.tokens, tree.parents)
    assert chosen.emitted((1, 5)) == (1, 5)
