"""Run a model's multi-token prediction (MTP) layers as a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.context_planning import check_contexts_fit
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.head_context import HeadContext
from edgespec.backends.llamacpp.kv_types import KvTypes
from edgespec.backends.llamacpp.loading import check_file, threads_for
from edgespec.backends.llamacpp.mtp_files import MtpLayers
from edgespec.backends.llamacpp.native import library
from edgespec.engine.tree import TokenTree

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.model import LlamaCppModel

__all__ = ["ChainedMtpHead", "MtpHead"]

_F16 = KvTypes("f16", "f16")


class MtpHead(PairHead):
    """An MTP layer as a head.

    The layer reads the target's final hidden states, or its own hidden states for draft tokens.
    """

    def __init__(
        self,
        target: LlamaCppModel,
        weights: Any,
        path: Path,
        layers: MtpLayers,
        options: LoadOptions,
        name: str,
        *,
        owns_weights: bool,
    ) -> None:
        self._own_weights = weights if owns_weights else None
        self._count = layers.count
        max_plan = _plan(layers, options)
        check_contexts_fit([max_plan], check_file(str(path)) if owns_weights else 0, options)
        plan = max_plan.with_tokens(target.facts.context_tokens)
        context = HeadContext(weights, options, plan, threads_for(weights, options), mtp=True)
        states = layers.graph.states_read(library().llama_model_n_layer(target.weights[0]))
        try:
            log = target.log_hidden_states(states)
        except BaseException:
            context.close()
            raise
        super().__init__(target, weights, str(path), options, name, context, log, max_plan)
        if not owns_weights:
            self.facts = replace(self.facts, weight_bytes=layers.weight_bytes)

    def _target_states(self, start: int, count: int) -> NDArray[np.float32]:
        return self.log.rows(start - 1, start - 1 + count)

    def _free_weights(self) -> None:
        if self._own_weights is not None:
            library().llama_model_free(self._own_weights)


def _plan(layers: MtpLayers, options: LoadOptions) -> ContextPlan:
    """Return the context plan for MTP layers, whose KV cache is separate from the target's."""
    assert options.context_tokens is not None
    sequences, token_bytes = options.max_branches + 1, layers.token_bytes
    return ContextPlan(
        options.context_tokens,
        _F16,
        sequences,
        kv_bytes=options.context_tokens * token_bytes,
        token_bytes=token_bytes,
        rows=max(options.batch_tokens, sequences),
    )


class ChainedMtpHead(MtpHead):
    """Several MTP layers, each of which was trained to predict one token further than the previous layer.

    The first layer predicts the root's children in the draft tree, the second layer predicts their children,
    and so on. The last layer also predicts all deeper nodes. Layers cannot share keys and values, so every
    layer processes all tokens.
    """

    _context: HeadContext

    # Index of the MTP layer that runs the current level of the draft tree.
    _layer = 0

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
        logits = self._context.run_pairs(tree.tokens, states, positions, sequences)
        self._own_states.extend(self._context.last_states(tree.width)[first:])
        return logits[first:]

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Remove the KV cells of all nodes. The next prefill runs the accepted tokens with every layer."""
        self._check()
        self._cells.end_round()
