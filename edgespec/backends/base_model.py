"""What most models with a memory of their own do alike."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from edgespec.backends.base import LanguageModel, ModelFacts, Progress, SelfDraft, Vocabulary
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.errors import CancelledError, CapabilityError, ClosedError, ContextFullError

__all__ = ["MAX_CACHED_PIECES", "BaseModel", "in_batches", "scaled_progress"]

# Of so many tokens a vocabulary keeps at hand what they are in bytes: all there are would take tens of MiB.
MAX_CACHED_PIECES = 8192


def in_batches(
    tokens: Sequence[int], batch_tokens: int, progress: Progress | None
) -> Iterator[Sequence[int]]:
    """The tokens of a prefill, so many at once; `progress` is told after each. Raises CancelledError."""
    for start in range(0, len(tokens), batch_tokens):
        batch = tokens[start : start + batch_tokens]
        yield batch
        if progress and not progress("prefill", (start + len(batch)) / len(tokens)):
            raise CancelledError("cancelled")


def scaled_progress(progress: Progress, begin: float, share: float) -> Progress:
    """The progress of a part of the work, which begins at `begin` of all and is `share` of it."""
    return lambda what, fraction: progress(what, begin + share * fraction)


class BaseModel(ABC):
    """A LanguageModel that computes nothing in the background and does not draft for itself."""

    facts: ModelFacts
    vocabulary: Vocabulary
    _closed: bool = False

    @property
    @abstractmethod
    def length(self) -> int:
        """See the Protocol."""

    @property
    def free_tokens(self) -> int:
        return self.facts.context_tokens - self.length

    def run_ahead(self, enabled: bool) -> None:  # noqa: B027
        """Nothing runs in the background."""

    def pipeline_with(self, draft: LanguageModel | None) -> None:  # noqa: B027
        """No pass is begun on guesses that are not there yet."""

    def self_draft(self, method: SelfDraft) -> LanguageModel:  # noqa: ARG002
        """Raises CapabilityError."""
        reason = self.facts.capabilities.reason
        raise CapabilityError(f"{self.facts.name} cannot draft for itself{reason and f': {reason}'}")

    @cached_property
    def _views(self) -> weakref.WeakSet[SelfDraftView[Any]]:
        """Drafts on this model's memory, as long as somebody holds them."""
        return weakref.WeakSet()

    def _span(self, start: int, end: int | None) -> tuple[int, int]:
        """The tokens [start, end) that a snapshot holds of those; all, of a memory that cannot be cut."""
        if not self.facts.capabilities.partial_truncate:
            return 0, self.length
        end = self.length if end is None else min(end, self.length)
        return min(start, end), end

    def _check_size(self, context_tokens: int) -> None:
        """Raises ClosedError, and ContextFullError when a context of that size does not hold the cache."""
        self._check(0)
        if context_tokens < max(1, self.length):
            raise ContextFullError(
                f"{self.length} cached tokens do not fit a context of {context_tokens}", "keep fewer of them"
            )

    def _now_sized(self, context_tokens: int, kv_bytes: int) -> None:
        """The context has another size: `facts` and views say so."""
        self.facts = replace(self.facts, context_tokens=context_tokens, kv_bytes=kv_bytes)
        for view in list(self._views):
            if not view.closed:
                view.resized()

    def check_open(self) -> None:
        """Raises ClosedError."""
        self._check(0)

    def _check(self, more: int) -> None:
        """Raises ClosedError, and ContextFullError when the context does not take so many tokens more."""
        if self._closed:
            raise ClosedError(f"{self.facts.name} is closed")
        check_tokens_fit(self, more)
