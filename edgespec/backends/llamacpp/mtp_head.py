"""Run a model's multi-token prediction (MTP) layers as a head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.head_context import HeadPass, PairContext
from edgespec.backends.llamacpp.head_file import HeadParts
from edgespec.backends.llamacpp.kv_types import KvTypes
from edgespec.backends.llamacpp.mtp_files import MtpLayers
from edgespec.engine.tree import TokenTree

__all__ = ["ChainedMtpHead", "plan_mtp_context"]

_F16 = KvTypes("f16", "f16")


def plan_mtp_context(layers: MtpLayers, options: LoadOptions) -> ContextPlan:
    """Return the context plan for MTP layers, whose KV cache is separate from the target's."""
    assert options.context_tokens is not None
    slots, token_bytes = options.parallel, layers.token_bytes
    tokens, sequences = options.context_tokens * slots, (options.max_branches + 1) * slots
    return ContextPlan(
        tokens,
        _F16,
        sequences,
        kv_bytes=tokens * token_bytes,
        token_bytes=token_bytes,
        rows=max(options.batch_tokens, sequences),
        slots=slots,
    )


class ChainedMtpHead(PairHead):
    """Several MTP layers, each of which was trained to predict one token further than the previous layer.

    The first layer predicts the root's children in the draft tree, the second layer predicts their children,
    and so on. The last layer also predicts all deeper nodes. Layers cannot share keys and values, so every
    layer processes all tokens.

    Args:
        layers: Number of layers.
        parts: The weights, the target and the context.
    """

    _context: PairContext

    # Index of the MTP layer that runs the current level of the draft tree.
    _layer = 0

    def __init__(self, layers: int, parts: HeadParts) -> None:
        super().__init__(parts)
        self._count = layers

    def _append(self, tokens: Sequence[int]) -> None:
        for layer in range(self._count):
            # Free the KV cells of these tokens, so that every layer uses the same cells for a token.
            self._cells.truncate(self.length)
            self._context.select_mtp_layer(layer)
            super()._append(tokens)

    def _run_tree(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        before, self._layer = self._layer, min(self._layer + 1, self._count - 1) if first else 0
        self._context.select_mtp_layer(self._layer)
        if first == 0 or self._layer == before:
            return super()._run_tree(tree, first)
        self._cells.end_round()
        positions, sequences = self._cells.place_tree(tree, 0)
        states = self._states_before(tree, 0, positions)
        rows = self._context.compute(HeadPass("draft", tree.tokens, states, positions, sequences))
        self._own_states.extend(rows.states[first:])
        return rows.logits[first:]

    def commit(self, path: tuple[int, ...]) -> None:
        """Remove the KV cells of all nodes. The next prefill runs the accepted tokens with every layer."""
        self._known_nodes = 0
        super().commit(path)
