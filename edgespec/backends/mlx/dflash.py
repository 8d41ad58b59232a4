"""Draft with a DFlash or DSpark head, which predicts a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, ModelFacts, Progress, Snapshot
from edgespec.backends.base_model import in_batches
from edgespec.backends.hidden_state_log import HiddenStateLog
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.cache_serialization import deserialize_head, serialize_head
from edgespec.backends.mlx.dflash_network import DFlashNetwork
from edgespec.backends.mlx.evaluation import evaluate, start_evaluation, translate_errors
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.backends.mlx.target_ends import DraftVocabulary
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError
from edgespec.heads.dflash_config import DFlashConfig

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["BATCH_TOKENS", "DFlashHead"]

# Maximum number of tokens per pass. A pass cannot be interrupted.
BATCH_TOKENS = 64


class DFlashHead(SelfDraftView["MlxModel"]):
    """A draft model with its own KV cache, which predicts a block of tokens from the target's hidden states.

    The entry at position p of the cache is computed from the target's hidden states at p, not from the token
    there. A pass runs a block: the last emitted token, and mask tokens in the places of those to draft. The
    block leaves no entries in the cache.

    The logits after a drafted token depend only on its place in the block, and with a Markov head, also on
    the token itself. So one pass serves a whole draft tree: `verify` runs it for the tree's root, and returns
    its further rows for deeper nodes.

    Args:
        target: The target.
        log: A log of the target's hidden states that the head reads. The head closes it.
        network: The head, with evaluated weights.
        config: Its configuration.
        embed: Returns the embeddings of tokens.
        lm_head: Returns the logits [tokens, draft vocabulary] for normalised hidden states.
        target_ids: For each token of the draft vocabulary, the token of the target. None if they are equal.
        facts: The head's name and sizes.
    """

    def __init__(
        self,
        target: MlxModel,
        log: HiddenStateLog,
        network: DFlashNetwork,
        config: DFlashConfig,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        super().__init__(target)
        self.log, self._network, self._config = log, network, config
        self._embed, self._lm_head = embed, lm_head
        self._draft_vocabulary = DraftVocabulary(target_ids, target.facts.vocab_size)
        self._dtype = network.fc.weight.dtype
        self._first_row = 0 if config.predicts_next else 1
        self.vocabulary = target.vocabulary
        self.facts = replace(
            facts,
            capabilities=Capabilities(
                rollback=True,
                tree=True,
                max_draft_length=config.block_tokens - self._first_row,
                drafts_in_one_pass=True,
            ),
        )
        self._layout = PassLayout()
        self._interrupted = False
        self._clear(0)

    def _clear(self, position: int) -> None:
        """Empty the KV cache. Its first row will belong to the token at `position`."""
        self._caches = [AttentionCache(self._layout) for _ in range(self._config.layers)]
        self._start = self._length = position
        self._end_round()

    def _end_round(self) -> None:
        """Discard the block that was run last."""
        # The logits of the block, from the row on that predicts the token after the block's first.
        self._rows = mx.zeros((0, 0))
        # Number of the tree's nodes before the block, whose hidden states are known.
        self._known_nodes = 0
        self._rewind(self._length)

    def _rewind(self, length: int) -> None:
        for cache in self._caches:
            cache.rewind(length - self._start)

    @property
    def length(self) -> int:
        return self._length

    @property
    def free_tokens(self) -> int:
        return max(0, self.facts.context_tokens - self._length)

    @property
    def first_position(self) -> int:
        return self.log.start

    @property
    def last_position(self) -> int:
        return self.log.end

    def start_at(self, position: int) -> None:
        """Empty the KV cache, and let it begin at a position. Tokens before it are never run."""
        self._check()
        self._clear(position)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()
        check_tokens_fit(self, len(tokens))
        self._end_round()
        for batch in in_batches(tokens, BATCH_TOKENS, progress):
            self._check_not_interrupted()
            end = self._length + len(batch)
            try:
                self._add_states(self._length, end)
                evaluate(*self._state)
            except BaseException:
                self._end_round()
                raise
            self._length = end

    def _add_states(self, start: int, end: int) -> None:
        """Append the entries of positions [start, end) to the KV cache."""
        self._layout.set_chain(start - self._start)
        with translate_errors("the head could not be run"):
            self._network.add_states(mx.array(self.log.rows(start, end)).astype(self._dtype), self._caches)

    @property
    def _state(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.state]

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        """See `LanguageModel.verify`. Rows of tokens before the block are those of its first token."""
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            self._check_not_interrupted()
            if first == 0:
                self._run_block(tree)
            depths = np.maximum(np.array(tree.depths[first:]) - self._known_nodes, 0)
            if depths.max() >= len(self._rows):
                raise CapabilityError(
                    f"{self.facts.name} drafts at most {len(self._rows):,} tokens",
                    f"use --draft-length {len(self._rows)} or less",
                )
            rows = self._rows_after(tree.tokens[first:], depths)
            start_evaluation(rows)
            return DeviceLogits(rows, tree.depths[first:])
        except BaseException:
            self._end_round()
            raise

    def _run_block(self, tree: TokenTree) -> None:
        """Run a block after the tokens of the tree whose hidden states are known."""
        self._end_round()
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
        evaluate(self._rows, *self._state)
        self._known_nodes = known

    def _rows_after(self, tokens: Sequence[int], depths: NDArray[np.int64]) -> mx.array:
        """Return the logits after tokens at these depths of the draft."""
        with translate_errors("the head could not be run"):
            rows = self._rows[mx.array(depths)]
            if self._config.markov_rank:
                rows = rows + self._network.markov_head(mx.array(list(tokens))).astype(mx.float32)
            return self._draft_vocabulary.spread(rows)

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Keep the entries of tokens whose hidden states were known."""
        self._check()
        self._length += self._known_nodes
        self._end_round()

    def truncate(self, length: int) -> None:
        self._check()
        self._length = min(length, self._length)
        self._start = min(self._start, self._length)
        self._end_round()

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy the KV cache at positions [start, end). If it begins later, start there."""
        self._check()
        self._end_round()
        end = self._length if end is None else min(end, self._length)
        start = min(max(start, self._start), end)
        data = serialize_head(self._caches, self._start, start, end) if start < end else b""
        return Snapshot(end, data, start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check()
        self._end_round()
        start, end = snapshot.start, snapshot.length
        try:
            if not self._length == start <= end <= self.facts.context_tokens:
                raise BackendError(
                    f"the saved KV cache does not fit {self.facts.name}", "process the prompt again"
                )
            if start < end:
                deserialize_head(self._caches, self._start, start, snapshot.data)
        except BackendError:
            self._clear(0)
            raise
        self._length = end
        self._end_round()

    def interrupt(self, enabled: bool) -> None:
        self._interrupted = enabled

    def _check_not_interrupted(self) -> None:
        if self._interrupted:
            raise CancelledError("the model's computation was cancelled")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._target.stop_logging(self.log)
        self._rows = mx.zeros((0, 0))
        del self._network, self._caches, self._embed, self._lm_head, self._draft_vocabulary
