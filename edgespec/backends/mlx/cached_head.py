"""Base class for MLX draft heads that have their own KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.head_view import CachedHeadView
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.cache_serialization import deserialize_head, serialize_head
from edgespec.backends.mlx.evaluation import evaluate
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.backends.mlx.target_ends import DraftVocabulary, HeadTarget
from edgespec.engine.tree import TokenTree
from edgespec.model.memory_check import check_tokens_fit
from edgespec.model.model_facts import ModelFacts

__all__ = ["BATCH_TOKENS", "CachedHead"]

# Maximum number of tokens per pass. Bounds how long an interrupt waits, because a pass cannot be interrupted.
BATCH_TOKENS = 64


class CachedHead(CachedHeadView[HeadTarget]):
    """A head that MLX runs, with one or more KV caches.

    Args:
        target: The target.
        states: The hidden states of the target that the head reads. Passed to `log_hidden_states`.
        network: The head's network, with evaluated weights. Its attributes `dtype` and `cache_count` are its
            data type and the number of KV caches that it needs.
        embed: Returns the embeddings of token ids.
        lm_head: Returns the logits [tokens, draft vocabulary] for normalised hidden states.
        target_ids: The target's token id for each token of the draft vocabulary, or None if the vocabularies
            are the same.
        facts: The head's name, sizes and capabilities.
    """

    _network: Any
    _batch_tokens = BATCH_TOKENS

    def __init__(
        self,
        target: HeadTarget,
        states: Sequence[int],
        network: Any,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        self._network = network
        self._embed, self._lm_head = embed, lm_head
        self._draft_vocabulary = DraftVocabulary(target_ids, target.facts.vocab_size)
        self._dtype = network.dtype
        self.facts = facts
        self._layout = PassLayout()
        self._restart(0)
        # Open the log last, because nothing would close it if a later line failed.
        super().__init__(target, target.log_hidden_states(states))

    def _restart(self, position: int) -> None:
        self._caches = [AttentionCache(self._layout) for _ in range(self._network.cache_count)]
        self._start = position
        self._keep(position)

    def _keep(self, length: int) -> None:
        super()._keep(length)
        self._start, self._length = min(self._start, length), length
        self._rewind(length)

    def _rewind(self, length: int) -> None:
        for cache in self._caches:
            cache.rewind(length - self._start)

    @property
    def _cache_arrays(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.state]

    @property
    def _first_cached(self) -> int:
        return self._start

    def _append(self, tokens: Sequence[int]) -> None:
        self._run_known(tokens)
        evaluate(*self._cache_arrays)

    @abstractmethod
    def _run_known(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the KV cache without evaluating its arrays."""

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            self._check_not_interrupted()
            return self._run_tree(tree, first)
        except BaseException:
            self._keep(self.length)
            raise

    @abstractmethod
    def _run_tree(self, tree: TokenTree, first: int) -> DeviceLogits:
        """Run a tree's nodes, starting at `first`, and return their logits."""

    def _export(self, start: int, end: int) -> bytes:
        return serialize_head(self._caches, self._start, start, end) if start < end else b""

    def _import(self, start: int, end: int, data: bytes) -> bool:
        return start == end or deserialize_head(self._caches, self._start, start, data)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._keep(self.length)
            del self._network, self._caches, self._embed, self._lm_head, self._draft_vocabulary
