"""Base classes for heads, which draft from the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BackendError, CapabilityError, ClosedError
from edgespec.model.base import Progress, Snapshot
from edgespec.model.base_model import BaseModel, M, SelfDraftView, in_batches
from edgespec.model.heads.cached_attention import CachedAttention
from edgespec.model.hidden_state_log import HiddenStateLog
from edgespec.model.memory_check import check_tokens_fit

__all__ = ["AttentionHeadView", "CachedHeadView", "HeadView"]


class HeadView(SelfDraftView[M]):
    """A head that runs each token together with the target's hidden state at the preceding position.

    Args:
        target: The target.
        log: The log of the target's hidden states. Closed together with the view.
        release: Called when the view is closed.
    """

    def __init__(self, target: M, log: HiddenStateLog, release: Callable[[], None] = lambda: None) -> None:
        super().__init__(target)
        self.vocabulary = target.vocabulary
        self.log, self._release = log, release

    @property
    def free_tokens(self) -> int:
        return max(0, self.facts.context_tokens - self.length)

    @property
    def first_position(self) -> int:
        """The first position whose required hidden state is in the log."""
        return self.log.start + 1

    @property
    def last_position(self) -> int:
        """The last position whose required hidden state is in the log."""
        return self.log.end

    def _logged_states(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the hidden state before each of `count` tokens, starting at position `start`."""
        return self.log.rows(start - 1, start - 1 + count)

    @abstractmethod
    def start_at(self, position: int) -> None:
        """Clear the KV cache and make it start at `position`. Tokens before `position` are never run."""

    def _check_draft_length(self, length: int, limit: int) -> None:
        """Raise CapabilityError if a draft of `length` tokens is longer than `limit`."""
        if length > limit:
            raise CapabilityError(
                f"{self.facts.name} drafts at most {limit:,} tokens",
                f"use --draft-length {limit} or less",
                code="draft_too_wide",
            )

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._target.stop_logging(self.log)
            self._release()


class CachedHeadView(HeadView[M]):
    """A head with its own KV cache, computed from the target's hidden states.

    In addition to the `length` committed tokens, the cache can contain the tokens of a draft. Subclasses
    implement `verify` and the abstract methods, which access the cache.
    """

    _length: int
    # Maximum number of tokens per prefill pass.
    _batch_tokens: int
    # Number of nodes in the current draft tree that were run with the target's own hidden states.
    _known_nodes = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    @abstractmethod
    def _first_cached(self) -> int:
        """The position of the first token in the cache, or `length` if the cache is empty."""

    @abstractmethod
    def _restart(self, position: int) -> None:
        """Clear the cache and make it start at `position`."""

    @abstractmethod
    def _append(self, tokens: Sequence[int]) -> None:
        """Append keys and values for `tokens` to the cache, computed from the target's hidden states."""

    @abstractmethod
    def _export(self, start: int, end: int) -> bytes:
        """Return a copy of the cache at positions [start, end)."""

    @abstractmethod
    def _import(self, start: int, end: int, data: bytes) -> bool:
        """Append data from `_export` to the cache. Return whether it was compatible."""

    @abstractmethod
    def _keep(self, length: int) -> None:
        """Truncate the cache to `length` tokens, all of which are then committed.

        Subclasses also discard their state for the current draft.
        """
        self._known_nodes = 0

    def start_at(self, position: int) -> None:
        self._check()
        self._restart(position)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()
        check_tokens_fit(self, len(tokens))
        self._keep(self.length)
        for batch in in_batches(tokens, self._batch_tokens, progress):
            self._check_not_interrupted()
            try:
                self._append(batch)
            except ClosedError:  # The cache has been freed.
                raise
            except BaseException:
                self._keep(self.length)
                raise
            self._keep(self.length + len(batch))

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Keep the keys and values that were computed from the target's hidden states."""
        self._check()
        self._keep(self.length + self._known_nodes)

    def truncate(self, length: int) -> None:
        self._check()
        self._keep(min(length, self.length))

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy the cache at positions [start, end), or from its first position on if that is later."""
        self._check()
        self._keep(self.length)
        end = self.length if end is None else min(end, self.length)
        start = min(max(start, self._first_cached), end)
        return Snapshot(end, self._export(start, end), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check()
        self._keep(self.length)
        start, end = snapshot.start, snapshot.length
        fits = self.length == start <= end <= self.facts.context_tokens
        if not (fits and self._import(start, end, snapshot.data)):
            self._restart(0)
            raise BackendError(
                f"the saved KV cache does not fit {self.facts.name}",
                "process the prompt again",
                code="state_not_restored",
            )
        self._keep(end)


class AttentionHeadView(CachedHeadView[BaseModel]):
    """A head with a single attention layer that runs in NumPy. Subclasses set `_attention` and `_length`."""

    _attention: CachedAttention

    @property
    def _first_cached(self) -> int:
        return self._attention.start

    def _restart(self, position: int) -> None:
        self._attention.restart(position)
        self._keep(position)

    def _export(self, start: int, end: int) -> bytes:
        return self._attention.copy(start, end)

    def _import(self, start: int, end: int, data: bytes) -> bool:
        return self._attention.restore(end - start, data)

    def _keep(self, length: int) -> None:
        super()._keep(length)
        self._attention.truncate(length)
        self._length = length

    def resized(self) -> None:
        tokens = self._target.facts.context_tokens
        token_bytes = self.facts.kv_bytes // self.facts.context_tokens if self.facts.context_tokens else 0
        self.facts = replace(self.facts, context_tokens=tokens, kv_bytes=token_bytes * tokens)
