"""The base class of heads, which draft from the target's hidden states, and the KV caches of heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError, ClosedError
from edgespec.model.base import Progress, Snapshot
from edgespec.model.base_model import BaseModel, M, SelfDraftView, in_batches
from edgespec.model.heads.cached_attention import CachedAttention
from edgespec.model.hidden_state_log import HiddenStateLog
from edgespec.model.memory_check import check_draft_width, check_tokens_fit
from edgespec.model.model_facts import ModelFacts

__all__ = ["AttentionCells", "HeadCells", "HeadView"]


class HeadCells(ABC):
    """The KV cache of a head. In addition to the committed tokens, it can contain the tokens of a draft."""

    @property
    def threads(self) -> int:
        """Number of threads that run the head. 0 if they are the target's."""
        return 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of committed tokens."""

    @property
    @abstractmethod
    def start(self) -> int:
        """The position of the first token in the cache, or `length` if the cache is empty."""

    @abstractmethod
    def restart(self, position: int) -> None:
        """Clear the cache and make it start at `position`. `HeadView` then calls `truncate(position)`."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Truncate the cache to `length` tokens, all of which are then committed."""

    @abstractmethod
    def export(self, start: int, end: int) -> bytes:
        """Return a copy of the cache at positions [start, end)."""

    @abstractmethod
    def append_exported(self, start: int, end: int, data: bytes) -> bool:
        """Append data from `export` to the cache. Return whether it was compatible."""

    def capacity(self, context_tokens: int) -> int:
        """Return the maximum number of tokens, given the head's context size."""
        return context_tokens

    def resized(self, facts: ModelFacts, context_tokens: int) -> ModelFacts:
        """Follow a resize of the target to `context_tokens`, and return the head's new facts."""
        return replace(facts, context_tokens=context_tokens)

    def interrupt(self, enabled: bool) -> None:  # noqa: B027
        """Abort a running pass. See `LanguageModel.interrupt`."""


class _TargetCells(HeadCells):
    """Stands in for the KV cache of a head that has none. Its tokens are those of the target."""

    def __init__(self, target: BaseModel, log: HiddenStateLog) -> None:
        self._target, self._log = target, log

    @property
    def length(self) -> int:
        # A recurrent target may have been rewound, so it can lag behind the sequence until its next pass. The
        # log still covers the whole sequence.
        return max(self._target.length, self._log.end)

    @property
    def start(self) -> int:
        return self.length

    def restart(self, position: int) -> None:
        pass

    def truncate(self, length: int) -> None:
        pass

    def export(self, start: int, end: int) -> bytes:  # noqa: ARG002
        return b""

    def append_exported(self, start: int, end: int, data: bytes) -> bool:  # noqa: ARG002
        return True


class AttentionCells(HeadCells):
    """The KV cache of a head with a single attention layer that runs in NumPy."""

    length = 0

    def __init__(self, attention: CachedAttention) -> None:
        self._attention = attention

    @property
    def start(self) -> int:
        return self._attention.start

    def restart(self, position: int) -> None:
        self._attention.restart(position)

    def truncate(self, length: int) -> None:
        self._attention.truncate(length)
        self.length = length

    def export(self, start: int, end: int) -> bytes:
        return self._attention.copy(start, end)

    def append_exported(self, start: int, end: int, data: bytes) -> bool:
        return self._attention.restore(end - start, data)

    def resized(self, facts: ModelFacts, context_tokens: int) -> ModelFacts:
        token_bytes = facts.kv_bytes // facts.context_tokens if facts.context_tokens else 0
        return replace(facts, context_tokens=context_tokens, kv_bytes=token_bytes * context_tokens)


class HeadView(SelfDraftView[M]):
    """A head that runs each token together with the target's hidden state at the preceding position.

    Subclasses set `facts` and implement `_run_tree`, and `_append` if the head has a KV cache.

    Args:
        target: The target.
        log: The log of the target's hidden states. Closed together with the view.
        release: Called when the view is closed.
        cells: The head's KV cache. None if it has none.
    """

    # Maximum number of tokens per prefill pass.
    _batch_tokens = 64
    # Number of nodes in the current draft tree that were run with the target's own hidden states.
    _known_nodes = 0

    def __init__(
        self,
        target: M,
        log: HiddenStateLog,
        release: Callable[[], None] = lambda: None,
        cells: HeadCells | None = None,
    ) -> None:
        super().__init__(target)
        self.vocabulary = target.vocabulary
        self.log, self._release = log, release
        self._cells = cells or _TargetCells(target, log)

    @property
    def length(self) -> int:
        return self._cells.length

    @property
    def free_tokens(self) -> int:
        return max(0, self._cells.capacity(self.facts.context_tokens) - self.length)

    @property
    def threads(self) -> int:
        return self._cells.threads or self._target.threads

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

    def _check_draft_length(self, length: int, limit: int) -> None:
        """Raise CapabilityError if a draft of `length` tokens is longer than `limit`."""
        if length > limit:
            raise CapabilityError(
                f"{self.facts.name} drafts at most {limit:,} tokens",
                f"use --draft-length {limit} or less",
                code="draft_too_wide",
            )

    def _append(self, tokens: Sequence[int]) -> None:
        """Append keys and values for `tokens` to the cache, computed from the target's hidden states."""

    @abstractmethod
    def _run_tree(self, tree: TokenTree, first: int) -> Logits:
        """Run a tree's nodes, starting at `first`, and return their logits."""

    def _keep(self, length: int) -> None:
        """Truncate the cache to `length` tokens, all of which are then committed.

        Subclasses also discard their state for the current draft.
        """
        self._known_nodes = 0
        self._cells.truncate(length)

    def start_at(self, position: int) -> None:
        """Clear the KV cache and make it start at `position`. Tokens before `position` are never run."""
        self._check()
        self._restart(position)

    def _restart(self, position: int) -> None:
        self._cells.restart(position)
        self._keep(position)

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

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            check_draft_width(tree.width, self.facts.capabilities.max_width)
            self._check_not_interrupted()
            return self._run_tree(tree, first)
        except ClosedError:  # The cache has been freed.
            raise
        except BaseException:
            self._keep(self.length)
            raise

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
        start = min(max(start, self._cells.start), end)
        return Snapshot(end, self._cells.export(start, end), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check()
        self._keep(self.length)
        start, end = snapshot.start, snapshot.length
        fits = self.length == start <= end <= self.facts.context_tokens
        if not (fits and self._cells.append_exported(start, end, snapshot.data)):
            self._restart(0)
            raise BackendError(
                f"the saved KV cache does not fit {self.facts.name}",
                "process the prompt again",
                code="state_not_restored",
            )
        self._keep(end)

    def resized(self) -> None:
        self.facts = self._cells.resized(self.facts, self._target.facts.context_tokens)

    def interrupt(self, enabled: bool) -> None:
        super().interrupt(enabled)
        self._cells.interrupt(enabled)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._target.stop_logging(self.log)
            self._release()
