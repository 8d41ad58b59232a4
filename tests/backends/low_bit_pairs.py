"""A target with its low-bit copy, and comparisons of the copy's KV cells with the target's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.gguf_model import GgufModel
from edgespec.engine.tree import TokenTree
from edgespec.model.base import LanguageModel, LowBit
from tests.backends.contract import Rows, row_of

CONTEXT = 512


class Pair(NamedTuple):
    target: LanguageModel
    copy: Path
    rounding: float

    def view(self, sinks: int = 4, window: int | None = None) -> LanguageModel:
        return self.target.self_draft(LowBit(str(self.copy), sinks, window))


def draft_logits(view: LanguageModel, tree: TokenTree) -> Rows:
    """Return the view's logits for a tree that is drafted three nodes at a time."""
    rows = []
    for first in sorted(set(range(0, tree.width, 3))):
        some = TokenTree(tree.tokens[: first + 3], tree.parents[: first + 3], tree.draft_probs[: first + 3])
        logits = view.verify(some, first)
        rows += [row_of(view, logits, row) for row in range(some.width - first)]
    return np.stack(rows)


def assert_like_fresh_view(pair: Pair, view: LanguageModel, how: LowBit, tree: TokenTree) -> None:
    """Assert that the view has exactly the target's cells and gives the logits of a fresh view."""
    got = draft_logits(view, tree)
    assert_cells_match(pair.target, view, how)
    fresh = pair.target.self_draft(how)
    try:
        # With quantised keys, a different order of the cells may change the rounding by more.
        if pair.rounding:
            np.testing.assert_allclose(got, draft_logits(fresh, tree), rtol=0, atol=pair.rounding)
    finally:
        fresh.close()


def assert_cells_match(target: LanguageModel, view: LanguageModel, how: LowBit) -> None:
    """Assert that the view holds exactly the target's cells inside its window, and no others."""
    view_context = _context(view)
    assert isinstance(target, GgufModel)
    length = target.length
    begin = 0
    # If the window is about as large as the context, it covers everything.
    if how.window_tokens and view_context.plan.tokens < target.max_plan.tokens:
        # The window advances in steps of 64 tokens.
        begin = how.sink_tokens + max(0, (length - how.window_tokens - how.sink_tokens) // 64 * 64)
    nothing = view_context.export_cells(0, CONTEXT + 1, CONTEXT + 2)
    for position in range(length):
        there = view_context.export_cells(0, position, position + 1)
        if min(how.sink_tokens, begin) <= position < begin:
            assert there == nothing
        else:
            assert there == target.export_cells(position, position + 1)


def _context(model: LanguageModel) -> LlamaContext:
    context = model._context  # type: ignore[attr-defined]
    assert isinstance(context, LlamaContext)
    return context
