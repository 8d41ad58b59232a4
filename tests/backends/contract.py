"""Helpers of the contract tests: single-token steps, fresh prefills and tree shapes."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.engine.tree import TokenTree
from edgespec.model.base import LanguageModel

# Rounding errors between passes of different widths. Float kernels depend on the width. The demo model's
# quantised kernels are exact only on x86.
ROUNDING = {
    # Rounding values to bf16 amplifies small differences.
    "tiny": 2e-3,
    "three layers": 2e-2,
    "window in halves": 5e-2,
    "window": 5e-2,
    "mamba": 1e-4,
    "hybrid": 5e-3,
    "short convolution": 5e-3,
    "compressed keys": 5e-3,
    **dict.fromkeys(("demo", "streamed"), 0.0 if platform.machine() in ("x86_64", "AMD64") else 1.0),
}

Rows = NDArray[np.float64]


def row_of(model: LanguageModel, logits: object, row: int) -> Rows:
    """Return a copy of one row of logits."""
    everything = np.arange(model.facts.vocab_size)
    return logits.at(row, everything).copy()  # type: ignore[attr-defined,no-any-return]


def tokens_for(model: LanguageModel, count: int, seed: int = 0) -> list[int]:
    """Return random tokens of the vocabulary."""
    return np.random.default_rng(seed).integers(3, model.facts.vocab_size, count).tolist()  # type: ignore[no-any-return]


def step(model: LanguageModel, token: int) -> Rows:
    """Run one target step and return its logits."""
    row = row_of(model, model.verify(TokenTree.chain(token)), 0)
    model.commit(())
    return row


def step_all(model: LanguageModel, tokens: Sequence[int]) -> Rows:
    """Append tokens to the cache and return the logits after the last one."""
    model.prefill(tokens[:-1])
    return step(model, tokens[-1])


def fresh(model: LanguageModel, tokens: Sequence[int]) -> Rows:
    """Return the logits after `tokens`, computed with an empty cache."""
    model.truncate(0)
    return step_all(model, tokens)


def cut(model: LanguageModel, tokens: Sequence[int]) -> None:
    """Truncate the cache to its prefix `tokens`, and rerun any that a recurrent model lost."""
    model.truncate(len(tokens))
    assert model.length <= len(tokens)
    model.prefill(tokens[model.length :])


def same(model: LanguageModel, a: Rows, b: Rows) -> None:
    """Assert that logits are equal up to the rounding error of this model's kernels at different widths."""
    np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING.get(model.facts.name, 0.0))


# Each test run uses the first three, and `-m long` all.
TREES = {
    "chain": (-1, 0, 1, 2, 3),
    "late fork": (-1, 0, 1, 2, 2, 3, 4, 4),
    "deep and wide": (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 8),
    "fork": (-1, 0, 0),
    "fan": (-1, 0, 0, 0, 0, 0),
    "binary": (-1, 0, 0, 1, 1, 2, 2),
    "two chains": (-1, 0, 0, 1, 2, 3, 4, 5, 6),
}


def tree_of(model: LanguageModel, parents: tuple[int, ...], seed: int = 5) -> TokenTree:
    """Return a tree of a given shape whose siblings differ."""
    tokens = tokens_for(model, len(parents), seed)
    for node, parent in enumerate(parents):
        siblings = [tokens[i] for i in range(node) if parents[i] == parent]
        while tokens[node] in siblings:
            tokens[node] = 3 + (tokens[node] - 2) % (model.facts.vocab_size - 3)
    return TokenTree(tuple(tokens), parents, (None,) * len(parents))


def path_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Return the nodes from the root to `node`, without the root."""
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = tree.parents[node]
    return tuple(path[::-1])


def tokens_to(tree: TokenTree, node: int) -> list[int]:
    return [tree.tokens[0], *(tree.tokens[i] for i in path_to(tree, node))]


def needs(model: LanguageModel, shape: tuple[int, ...]) -> None:
    """Skip the test if the shape has branches and the model does not support them."""
    if not model.facts.capabilities.tree and shape != tuple(range(-1, len(shape) - 1)):
        pytest.skip("this model takes chains only")
