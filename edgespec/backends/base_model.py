"""The base class for models with their own KV cache."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel, Progress, Vocabulary
from edgespec.backends.hidden_state_log import HiddenStateLog, OpenLogs
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.model_facts import ModelFacts
from edgespec.backends.self_draft_methods import SelfDraft
from edgespec.engine.logits import Logits
from edgespec.errors import CancelledError, CapabilityError, ClosedError, ContextFullError

if TYPE_CHECKING:
    from edgespec.backends.self_draft_view import SelfDraftView

__all__ = [
    "MAX_CACHED_PIECES",
    "BaseModel",
    "check_progress",
    "in_batches",
    "scaled_progress",
    "split_last_batch",
]

# A vocabulary caches the bytes of at most this many tokens. Caching all of them would take tens of MiB.
MAX_CACHED_PIECES = 8192


def in_batches(
    tokens: Sequence[int], batch_tokens: int, progress: Progress | None
) -> Iterator[Sequence[int]]:
    """Split a prompt into prefill batches, and report progress after each.

    Raises:
        CancelledError: `progress` returned False.
    """
    for start in range(0, len(tokens), batch_tokens):
        batch = tokens[start : start + batch_tokens]
        yield batch
        if progress and not progress("reading the prompt", (start + len(batch)) / len(tokens)):
            raise CancelledError("processing the prompt was cancelled")


def split_last_batch(
    tokens: Sequence[int], batch_tokens: int, progress: Progress | None
) -> tuple[Sequence[int], Sequence[int], Progress | None]:
    """Split a prompt before its last batch.

    Returns:
        The tokens before the last batch, the last batch, and a progress callback for the first part.
    """
    start = (len(tokens) - 1) // batch_tokens * batch_tokens
    return tokens[:start], tokens[start:], progress and scaled_progress(progress, 0.0, start / len(tokens))


def check_progress(progress: Progress | None) -> None:
    """Report the end of a prefill. Raises CancelledError if `progress` returns False."""
    if progress and not progress("reading the prompt", 1.0):
        raise CancelledError("processing the prompt was cancelled")


def scaled_progress(progress: Progress, begin: float, share: float) -> Progress:
    """Return a progress callback for a part of a task, from the fraction `begin` to `begin + share`."""
    return lambda what, fraction: progress(what, begin + share * fraction)


class BaseModel(ABC):
    """Base class for models with their own KV cache. By default, they do not support self-drafting."""

    facts: ModelFacts
    vocabulary: Vocabulary
    _closed: bool = False

    @property
    @abstractmethod
    def length(self) -> int: ...

    @property
    def free_tokens(self) -> int:
        return self.facts.context_tokens - self.length

    @property
    def threads(self) -> int:
        return 0

    @property
    def max_threads(self) -> int:
        return 0

    def set_max_threads(self, threads: int) -> None:  # noqa: B027
        pass

    def set_adapter_scales(self, scales: Sequence[float]) -> None:  # noqa: ARG002
        raise CapabilityError(
            f"the adapter scales of {self.facts.name} are fixed when the model is loaded",
            "load the model again with other scales in --adapter",
        )

    @abstractmethod
    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None: ...

    def prefill_prompt(self, tokens: Sequence[int], progress: Progress | None = None) -> Logits | None:
        self.prefill(tokens[:-1], progress)
        return None

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:  # noqa: ARG002
        raise CapabilityError(
            f"{self.facts.name} cannot embed texts",
            "choose a GGUF model that was not prepared for early exit",
        )

    def run_ahead(self, enabled: bool) -> None:  # noqa: B027
        pass

    def pipeline_with(self, draft: LanguageModel | None) -> None:  # noqa: B027
        pass

    def self_draft(self, method: SelfDraft) -> LanguageModel:  # noqa: ARG002
        reason = self.facts.capabilities.reason
        raise CapabilityError(f"{self.facts.name} cannot draft for itself{reason and f': {reason}'}")

    @cached_property
    def _views(self) -> weakref.WeakSet[SelfDraftView[Any]]:
        """Draft models that share this model's KV cache."""
        return weakref.WeakSet()

    @cached_property
    def logs(self) -> OpenLogs:
        """Logs of hidden states, for models that are a `HiddenStateSource`."""
        return OpenLogs()

    def log_hidden_states(self, states: Sequence[int]) -> HiddenStateLog:  # noqa: ARG002
        """See `HiddenStateSource`."""
        raise CapabilityError(
            f"the hidden states of {self.facts.name} cannot be read", "choose a method that needs no head"
        )

    def stop_logging(self, log: HiddenStateLog) -> None:
        """See `HiddenStateSource`."""
        self.logs.close(log)

    def _span(self, start: int, end: int | None) -> tuple[int, int]:
        """Return the range of cached tokens to copy for a snapshot."""
        if not self.facts.capabilities.partial_truncate:
            return 0, self.length
        end = self.length if end is None else min(end, self.length)
        return min(start, end), end

    def _check_size(self, context_tokens: int) -> None:
        self._check(0)
        if context_tokens < max(1, self.length):
            raise ContextFullError(
                f"{self.length:,} cached tokens do not fit in a context of {context_tokens:,} tokens",
                "truncate the cache first",
            )

    def _now_sized(self, context_tokens: int, kv_bytes: int) -> None:
        """Update `facts` after a resize, and notify the draft models that share this model's cache."""
        self.facts = replace(self.facts, context_tokens=context_tokens, kv_bytes=kv_bytes)
        for view in list(self._views):
            if not view.closed:
                view.resized()

    def check_open(self) -> None:
        """Raise ClosedError if the model is closed."""
        self._check(0)

    def _check(self, more: int) -> None:
        """Raise ClosedError if the model is closed, or ContextFullError if `more` tokens do not fit."""
        if self._closed:
            raise ClosedError(f"the model {self.facts.name} is closed", "load the model again")
        check_tokens_fit(self, more)
