"""What every draft on another model's memory has in common: it keeps nothing, so most calls do nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from edgespec.backends.base import LanguageModel, ModelFacts, Progress, SelfDraft, Snapshot, Vocabulary
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ClosedError

__all__ = ["CacheOwner", "SelfDraftView"]


class CacheOwner(Protocol):
    """Whose memory a view drafts on."""

    @property
    def facts(self) -> ModelFacts:
        """Of the model it belongs to."""

    @property
    def length(self) -> int:
        """Tokens in its memory."""

    @property
    def free_tokens(self) -> int:
        """How many more tokens its context takes."""

    def check_open(self) -> None:
        """Raises ClosedError."""


L = TypeVar("L", bound=CacheOwner)


class SelfDraftView(ABC, Generic[L]):
    """What `LanguageModel.self_draft` gives: a draft whose memory is its target's.

    What is left to write is how it drafts: `verify` and `interrupt`, and what `close` has to free.
    """

    facts: ModelFacts
    vocabulary: Vocabulary

    def __init__(self, target: L) -> None:
        self._target = target
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    @property
    def length(self) -> int:
        return self._target.length

    @property
    def free_tokens(self) -> int:
        return self._target.free_tokens

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:  # noqa: ARG002
        """Nothing is to be done: the target's tokens are all there is."""
        self._check()

    @abstractmethod
    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        """See the Protocol."""

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Nothing is to be done: it is the target that keeps."""
        self._check()

    def truncate(self, length: int) -> None:  # noqa: ARG002
        """Nothing is to be done: only the target can be cut back."""
        self._check()

    def remove_range(self, start: int, end: int) -> None:  # noqa: ARG002
        """Raises CapabilityError."""
        self._check()
        raise CapabilityError(f"{self.facts.name} has no memory of its own", "ask the target to forget")

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:  # noqa: ARG002
        """Nothing but the length: the target's own snapshot holds the rest."""
        self._check()
        return Snapshot(self.length, b"")

    def restore(self, snapshot: Snapshot) -> None:  # noqa: ARG002
        """Raises CapabilityError."""
        self._check()
        raise CapabilityError(f"{self.facts.name} has no memory of its own", "restore the target")

    def resize(self, context_tokens: int) -> None:  # noqa: ARG002
        """Raises CapabilityError."""
        self._check()
        raise CapabilityError(f"{self.facts.name} has no memory of its own", "make the target's larger")

    def resized(self) -> None:
        """The target's context has another size now."""
        self.facts = replace(self.facts, context_tokens=self._target.facts.context_tokens)

    def run_ahead(self, enabled: bool) -> None:
        """Nothing runs in the background."""

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        """It verifies nobody's chains."""

    def self_draft(self, method: SelfDraft) -> LanguageModel:  # noqa: ARG002
        """Raises CapabilityError."""
        raise CapabilityError(f"{self.facts.name} is a draft already", "ask the target")

    @abstractmethod
    def interrupt(self, enabled: bool) -> None:
        """See the Protocol."""

    def close(self) -> None:
        """The target stays open."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.facts.name} is closed")
        self._target.check_open()
