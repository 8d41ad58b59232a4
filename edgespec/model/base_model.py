"""Base classes for models.

There is one class for models with their own KV cache, one for draft views that share a target's KV cache, and
one for draft models that run another model on a different token sequence.
"""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ClosedError, ContextFullError
from edgespec.model.base import LanguageModel, LoadOptions, Progress, SelfDraft, Snapshot, Vocabulary
from edgespec.model.hidden_states import HiddenStateLog, OpenLogs
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage
from edgespec.model.model_facts import Capabilities, ModelFacts

# Maximum number of tokens whose bytes a vocabulary caches. Caching all of them would take tens of MiB.
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
            raise CancelledError("prompt processing was cancelled")


def check_progress(progress: Progress | None) -> None:
    """Report the end of a prefill. Raises CancelledError if `progress` returns False."""
    if progress and not progress("reading the prompt", 1.0):
        raise CancelledError("prompt processing was cancelled")


def scaled_progress(progress: Progress, begin: float, share: float) -> Progress:
    """Map the progress of a subtask to the range from `begin` to `begin + share` of the whole task."""
    return lambda what, fraction: progress(what, begin + share * fraction)


class BaseModel(ABC):
    """Base class for models with their own KV cache. By default, self-drafting is not supported."""

    facts: ModelFacts
    vocabulary: Vocabulary
    _closed: bool = False

    @property
    @abstractmethod
    def length(self) -> int: ...

    @property
    def free_tokens(self) -> int:
        return self.facts.context_tokens - self.length - self.facts.capabilities.padding_tokens

    def _padded(self, tree: TokenTree) -> TokenTree:
        """Pad a draft tree to an allowed pass width."""
        return tree.padded(self.facts.capabilities.padded_width(tree.width))

    @property
    def threads(self) -> int:
        return 0

    @property
    def max_threads(self) -> int:
        return 0

    def set_max_threads(self, threads: int) -> None:  # noqa: B027
        pass

    def fix_threads(self, fixed: bool) -> None:  # noqa: B027
        pass

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:  # noqa: B027
        pass

    def set_adapter_scales(self, scales: Sequence[float]) -> None:  # noqa: ARG002
        raise CapabilityError(
            f"the adapter scales of {self.facts.name} are fixed when the model is loaded",
            "to change them, load the model again with different scales in --adapter",
        )

    @abstractmethod
    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None: ...

    def prefill_prompt(self, tokens: Sequence[int], progress: Progress | None = None) -> Logits | None:
        self.prefill(tokens[:-1], progress)
        return None

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:  # noqa: ARG002
        raise CapabilityError(
            f"{self.facts.name} cannot compute embeddings",
            "choose a GGUF model that was not prepared for early exit",
            code="embeddings_not_supported",
        )

    @abstractmethod
    def truncate(self, length: int) -> None: ...

    def repeat_cached(self, end: int) -> bool:  # noqa: ARG002
        self._check(0)
        return False

    def run_first_layers(self, enabled: bool) -> bool:  # noqa: ARG002
        self._check(0)
        self.truncate(0)
        return False

    def use_attention(self, options: LoadOptions) -> bool:  # noqa: ARG002
        self._check(0)
        self.truncate(0)
        return False

    # Why the model cannot see images, and what the user can do about it.
    why_blind = ("only GGUF models can", "choose a GGUF model that comes with an mmproj file")

    def prepare_image(self, image: Image) -> PreparedImage:  # noqa: ARG002
        why, next_step = self.why_blind
        raise CapabilityError(
            f"{self.facts.name} cannot see images: {why}", next_step, code="images_not_supported"
        )

    def run_ahead(self, enabled: bool) -> None:  # noqa: B027
        pass

    def pipeline_with(self, draft: LanguageModel | None) -> None:  # noqa: B027
        pass

    def check_can_draft(self, method: str) -> None:
        """Raise CapabilityError with the reason if the model does not support a self-drafting method."""
        if reason := self.facts.capabilities.self_draft_refusals.get(method):
            raise CapabilityError(
                f"the {method} method does not work with {self.facts.name}: {reason}",
                "choose another method, or use --exactness off",
            )

    def self_draft(self, method: SelfDraft) -> LanguageModel:  # noqa: ARG002
        reason = self.facts.capabilities.reason
        raise CapabilityError(f"{self.facts.name} cannot be its own draft model{reason and f': {reason}'}")

    @cached_property
    def _views(self) -> weakref.WeakSet[SelfDraftView[Any]]:
        """Draft models that share this model's KV cache."""
        return weakref.WeakSet()

    @cached_property
    def logs(self) -> OpenLogs:
        """Hidden-state logs, for models that implement `HiddenStateSource`."""
        return OpenLogs()

    def log_hidden_states(self, states: Sequence[int]) -> HiddenStateLog:  # noqa: ARG002
        """See `HiddenStateSource`."""
        raise CapabilityError(
            f"{self.facts.name} does not support draft heads, because its hidden states cannot be read",
            "choose a method that does not need a draft head",
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
                f"the {self.length:,} cached tokens do not fit in a context of {context_tokens:,} tokens",
                "truncate the cache first",
            )

    def _now_sized(self, context_tokens: int, kv_bytes: int) -> None:
        """Update `facts` after a resize, and notify the draft models that share this model's cache."""
        self.facts = replace(self.facts, context_tokens=context_tokens, kv_bytes=kv_bytes)
        for view in list(self._views):
            if not view.closed:
                view.resized()

    def _check(self, more: int) -> None:
        """Raise ClosedError if the model is closed, or ContextFullError if `more` tokens do not fit."""
        if self._closed:
            raise ClosedError(f"the model {self.facts.name} is closed", "load the model again")
        if more:
            self._check_fits(more)

    def _check_fits(self, more: int) -> None:
        """Raise ContextFullError if the context has no room for `more` tokens."""
        if more > self.free_tokens:
            raise ContextFullError(
                f"{self.length:,} cached tokens and {more:,} new tokens exceed the context of"
                f" {self.facts.context_tokens:,} tokens",
                "use a larger --context",
            )


M = TypeVar("M", bound=BaseModel)


class SelfDraftView(BaseModel, Generic[M]):
    """A draft model that shares its target's KV cache, as returned by `LanguageModel.self_draft`.

    All tokens are in the target's cache, so most calls do nothing. Subclasses implement `verify`, and extend
    `interrupt` and `close` if they own a context.
    """

    _interrupted = False

    def __init__(self, target: M) -> None:
        self._target = target

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def length(self) -> int:
        return self._target.length

    @property
    def free_tokens(self) -> int:
        return self._target.free_tokens

    @property
    def threads(self) -> int:
        return self._target.threads

    def set_adapter_scales(self, scales: Sequence[float]) -> None:  # noqa: ARG002
        raise self._unsupported("change adapters", "set_adapter_scales")

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:  # noqa: ARG002
        self._check()

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:  # noqa: ARG002
        raise self._unsupported("compute embeddings", "embed")

    def prepare_image(self, image: Image) -> PreparedImage:  # noqa: ARG002
        raise self._unsupported("prepare images", "prepare_image")

    @abstractmethod
    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        """See `LanguageModel.verify`."""

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        self._check()

    def truncate(self, length: int) -> None:  # noqa: ARG002
        self._check()

    def remove_range(self, start: int, end: int) -> None:  # noqa: ARG002
        raise self._unsupported("remove tokens", "remove_range")

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:  # noqa: ARG002
        """Return an empty snapshot, because a self-draft model has no KV cache of its own."""
        self._check()
        return Snapshot(self.length, b"")

    def restore(self, snapshot: Snapshot) -> None:  # noqa: ARG002
        raise self._unsupported("restore a snapshot", "restore")

    def resize(self, context_tokens: int) -> None:  # noqa: ARG002
        raise self._unsupported("be resized", "resize")

    def _unsupported(self, what: str, method: str) -> CapabilityError:
        self._check()
        return CapabilityError(
            f"{self.facts.name} uses the KV cache of the target and cannot {what}",
            f"call `{method}` on the target",
        )

    def resized(self) -> None:
        """Update `facts` with the target's current context size."""
        self.facts = replace(self.facts, context_tokens=self._target.facts.context_tokens)

    def self_draft(self, method: SelfDraft) -> LanguageModel:  # noqa: ARG002
        raise CapabilityError(
            f"{self.facts.name} is itself a self-draft model and cannot create another one",
            "call `self_draft` on the target model",
        )

    def interrupt(self, enabled: bool) -> None:
        self._interrupted = enabled

    def _check_not_interrupted(self) -> None:
        if self._interrupted:
            raise CancelledError("the model's computation was cancelled")

    def close(self) -> None:
        self._closed = True

    def _check(self, more: int = 0) -> None:
        if self._closed:
            raise ClosedError(f"the model {self.facts.name} is closed", "load the model again")
        self._target._check(more)


def wrapped_capabilities(inner: Capabilities, max_width: int) -> Capabilities:
    """Restrict a model's capabilities to those that a `WrappedModel` around it supports."""
    return replace(inner, max_width=max_width, partial_truncate=False, trainable=False)


class WrappedModel(BaseModel):
    """A draft model that runs another model on a shortened or translated token sequence.

    A snapshot contains only token ids. The other model reprocesses the tokens after `restore`.
    """

    def __init__(self, model: LanguageModel, vocabulary: Vocabulary) -> None:
        self._model = model
        self.vocabulary = vocabulary
        self._tokens: list[int] = []
        self._round: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self._tokens)

    @abstractmethod
    def truncate(self, length: int) -> None:
        """See `LanguageModel.truncate`."""

    def _append(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def _end_round(self) -> None:
        self._round = ()
        if not self._closed:
            self._model.truncate(self._model.length)

    def remove_range(self, start: int, end: int) -> None:
        raise CapabilityError(
            f"tokens {start} to {end} cannot be removed from the cache of {self.facts.name}",
            code="rollback_not_supported",
        )

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:  # noqa: ARG002
        self._check(0)
        self._end_round()
        return Snapshot(len(self._tokens), json.dumps(self._tokens).encode())

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self.truncate(0)
        try:
            tokens = json.loads(snapshot.data)
        except ValueError:
            tokens = None
        if not isinstance(tokens, list) or not len(tokens) == snapshot.length <= self.facts.context_tokens:
            raise BackendError(
                "the saved KV cache belongs to another model, or does not fit in the context",
                "process the prompt again",
                code="state_not_restored",
            )
        self._append(tokens)

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._closed = True
        self._model.close()
