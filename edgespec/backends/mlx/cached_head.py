"""The base class for heads with their own KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Progress, Snapshot
from edgespec.backends.base_model import in_batches
from edgespec.backends.hidden_state_log import HiddenStateLog
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.cache_serialization import deserialize_head, serialize_head
from edgespec.backends.mlx.evaluation import evaluate
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.backends.mlx.target_ends import DraftVocabulary
from edgespec.backends.model_facts import ModelFacts
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["BATCH_TOKENS", "CachedHead"]

# Maximum number of tokens per pass. Bounds how long an interrupt waits, because a pass cannot be interrupted.
BATCH_TOKENS = 64


class CachedHead(SelfDraftView["MlxModel"]):
    """A head with its own KV caches, which it computes from the target's hidden states.

    Args:
        target: The target.
        states: The hidden states of the target that the head reads. Passed to `log_hidden_states`.
        network: The head's network, with evaluated weights. Its attributes `dtype` and `cache_count` are its
            data type and the number of KV caches that it needs.
        embed: Returns the embeddings of token ids.
        lm_head: Returns the logits [tokens, draft vocabulary] for normalised hidden states.
        target_ids: The target's token id of each token of the draft vocabulary. None if both vocabularies are
            the same.
        facts: The head's name, sizes and capabilities.
    """

    _network: Any

    def __init__(
        self,
        target: MlxModel,
        states: Sequence[int],
        network: Any,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        super().__init__(target)
        self._network = network
        self._embed, self._lm_head = embed, lm_head
        self._draft_vocabulary = DraftVocabulary(target_ids, target.facts.vocab_size)
        self._dtype = network.dtype
        self.vocabulary, self.facts = target.vocabulary, facts
        self._layout = PassLayout()
        self._interrupted = False
        self._clear(0)
        # Open the log last. If anything failed after this line, nothing would call `close` to stop the log.
        self.log: HiddenStateLog = target.log_hidden_states(states)

    def _clear(self, position: int) -> None:
        """Empty the KV cache. Its first row will belong to the token at `position`."""
        self._caches = [AttentionCache(self._layout) for _ in range(self._network.cache_count)]
        self._start = self._length = position
        self._end_round()

    def _end_round(self) -> None:
        """Discard the current draft: remove all cache rows after the committed tokens."""
        # Number of nodes in the current draft tree that were run with the target's hidden states.
        self._known_nodes = 0
        self._rewind(self._length)

    def _rewind(self, length: int) -> None:
        for cache in self._caches:
            cache.rewind(length - self._start)

    @property
    def _cache_arrays(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.state]

    @property
    def length(self) -> int:
        return self._length

    @property
    def free_tokens(self) -> int:
        return max(0, self.facts.context_tokens - self._length)

    @property
    def last_position(self) -> int:
        """The last position whose token can be run with the target's hidden states."""
        return self.log.end

    def start_at(self, position: int) -> None:
        """Empty the KV cache, and let it begin at `position`. Tokens before `position` are never run."""
        self._check()
        self._clear(position)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()
        check_tokens_fit(self, len(tokens))
        self._end_round()
        for batch in in_batches(tokens, BATCH_TOKENS, progress):
            self._check_not_interrupted()
            try:
                self._append(batch)
                evaluate(*self._cache_arrays)
            except BaseException:
                self._end_round()
                raise
            self._length += len(batch)

    @abstractmethod
    def _append(self, tokens: Sequence[int]) -> None:
        """Append keys and values for `tokens`, computed from the target's hidden states, to the KV cache."""

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            self._check_not_interrupted()
            return self._run_tree(tree, first)
        except BaseException:
            self._end_round()
            raise

    @abstractmethod
    def _run_tree(self, tree: TokenTree, first: int) -> DeviceLogits:
        """Run a tree's nodes from `first` on, and return their logits."""

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Keep the cache rows of nodes that were run with the target's hidden states."""
        self._check()
        self._length += self._known_nodes
        self._end_round()

    def truncate(self, length: int) -> None:
        self._check()
        self._length = min(length, self._length)
        self._start = min(self._start, self._length)
        self._end_round()

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy the KV cache at positions [start, end). Start at the first cached position if it is later."""
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
        self._end_round()
        del self._network, self._caches, self._embed, self._lm_head, self._draft_vocabulary
