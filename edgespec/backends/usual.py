"""What most models with a memory of their own do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod

from edgespec.backends.base import LanguageModel, ModelFacts, SelfDraft, Vocabulary
from edgespec.backends.room import check_tokens_fit
from edgespec.errors import CapabilityError, ClosedError

__all__ = ["UsualModel"]


class UsualModel(ABC):
    """A LanguageModel that computes nothing in the background and does not draft for itself."""

    facts: ModelFacts
    vocabulary: Vocabulary
    _closed: bool = False

    @property
    @abstractmethod
    def length(self) -> int:
        """See the Protocol."""

    @property
    def room(self) -> int:
        return self.facts.context_tokens - self.length

    def run_ahead(self, wanted: bool) -> None:  # noqa: B027
        """Nothing runs in the background."""

    def follow(self, draft: LanguageModel | None) -> None:  # noqa: B027
        """No pass is begun on guesses that are not there yet."""

    def self_draft(self, how: SelfDraft) -> LanguageModel:  # noqa: ARG002
        """Raises CapabilityError."""
        reason = self.facts.capabilities.reason
        raise CapabilityError(f"{self.facts.name} cannot draft for itself{reason and f': {reason}'}")

    def check_open(self) -> None:
        """Raises ClosedError."""
        self._check(0)

    def _check(self, more: int) -> None:
        """Raises ClosedError, and ContextFullError when the context does not take so many tokens more."""
        if self._closed:
            raise ClosedError(f"{self.facts.name} is closed")
        check_tokens_fit(self, more)
