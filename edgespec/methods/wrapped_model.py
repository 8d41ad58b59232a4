"""Base class for draft models that wrap another model and feed it a different token sequence."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from edgespec.errors import BackendError, CapabilityError
from edgespec.model.base import LanguageModel, Snapshot, Vocabulary
from edgespec.model.base_model import BaseModel
from edgespec.model.model_facts import Capabilities

__all__ = ["WrappedModel", "wrapped_capabilities"]


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

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
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
                "the saved KV cache belongs to another model or exceeds the context",
                "process the prompt again",
                code="state_not_restored",
            )
        self._append(tokens)

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._closed = True
        self._model.close()
