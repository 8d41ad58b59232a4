"""Draft with a DFlash or DSpark head, which predicts a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.mlx.cached_head import CachedHead
from edgespec.backends.mlx.dflash_network import DFlashNetwork
from edgespec.backends.mlx.evaluation import evaluate, start_evaluation, translate_errors
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.model_facts import Capabilities, ModelFacts
from edgespec.engine.tree import TokenTree
from edgespec.heads.dflash_config import DFlashConfig

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["DFlashHead"]


class DFlashHead(CachedHead):
    """A draft model with its own KV cache, which predicts a block of tokens from the target's hidden states.

    The cache row for position p is computed from the target's hidden states at p rather than from the token
    at p. A pass runs a block, which consists of the last emitted token and a mask token for each token to
    draft. The block itself leaves no rows in the cache.

    The logits after a draft token depend only on the token's position in the block, and on the token itself
    if there is a Markov head. One pass is therefore enough for a whole draft tree: `verify` runs the pass for
    the root, and looks up the logits of deeper nodes in its result. Nodes whose hidden states the target has
    already computed get the logits of the block's first token.

    Args:
        config: The head's configuration. `CachedHead` describes the other arguments.
    """

    _network: DFlashNetwork

    def __init__(
        self,
        target: MlxModel,
        network: DFlashNetwork,
        config: DFlashConfig,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        self._config = config
        self._first_row = 0 if config.predicts_next else 1
        capabilities = Capabilities(
            rollback=True,
            tree=True,
            max_draft_length=config.block_tokens - self._first_row,
            drafts_in_one_pass=True,
        )
        facts = replace(facts, capabilities=capabilities)
        super().__init__(target, config.states, network, embed, lm_head, target_ids, facts)

    def _keep(self, length: int) -> None:
        super()._keep(length)
        # The logits of the last block, one row per draft token.
        self._rows = mx.zeros((0, 0))

    @property
    def first_position(self) -> int:
        """The first position whose hidden states are in the log."""
        return self.log.start

    def _run_known(self, tokens: Sequence[int]) -> None:
        self._add_states(self._length, self._length + len(tokens))

    def _add_states(self, start: int, end: int) -> None:
        """Append the target's hidden states at positions [start, end) to the head's KV cache."""
        self._layout.set_chain(start - self._start)
        with translate_errors("the head could not be run"):
            self._network.add_states(mx.array(self.log.rows(start, end)).astype(self._dtype), self._caches)

    def _run_tree(self, tree: TokenTree, first: int) -> DeviceLogits:
        if first == 0:
            self._run_block(tree)
        depths = np.maximum(np.array(tree.depths[first:]) - self._known_nodes, 0)
        self._check_draft_length(int(depths.max()) + 1, len(self._rows))
        rows = self._rows_after(tree.tokens[first:], depths)
        start_evaluation(rows)
        return DeviceLogits(rows, tree.depths[first:])

    def _run_block(self, tree: TokenTree) -> None:
        """Add the known hidden states of the tree's first nodes to the cache, and run a block after them."""
        self._keep(self.length)
        known = min(max(self.log.end - self._length, 0), tree.width - 1)
        begin = self._length + known
        if known:
            self._add_states(self._length, begin)
        masks = [self._config.mask_token] * (self._config.block_tokens - 1)
        self._layout.set_chain(begin - self._start)
        self._layout.scratch = True
        try:
            with translate_errors("the head could not be run"):
                embeddings = self._embed(mx.array([tree.tokens[known], *masks]))
                states = self._network(embeddings.astype(self._dtype), self._caches)
                self._rows = self._lm_head(states[self._first_row :]).astype(mx.float32)
        finally:
            self._layout.scratch = False
            self._rewind(begin)
        evaluate(self._rows, *self._cache_arrays)
        self._known_nodes = known

    def _rows_after(self, tokens: Sequence[int], depths: NDArray[np.int64]) -> mx.array:
        """Return one row of logits per token, given each token's depth below the first token of the block."""
        with translate_errors("the head could not be run"):
            rows = self._rows[mx.array(depths)]
            if self._config.markov_rank:
                rows = rows + self._network.markov_head(mx.array(list(tokens))).astype(mx.float32)
            return self._draft_vocabulary.spread(rows)
